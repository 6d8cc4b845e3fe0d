"""Log-probabilities of responses, as OpenAI's client reads them, and empty answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serving.wire.turns import TurnFinish
from tests.unit.serving.local_service import MODEL
from tests.unit.serving.responses_client import GREEDY, MOST, WEATHER, Served
from tests.unit.serving.sdk_clients import openai_of
from tests.unit.serving.telling_service import TellingService

LOGPROBS = "message.output_text.logprobs"


def logprobs_of(response: Any) -> list[dict[str, Any]]:
    (item,) = response.output
    return [entry.model_dump() for entry in item.content[0].logprobs]


async def test_they_are_those_of_a_chat(served: Served) -> None:
    asked: dict[str, Any] = {"store": False, "include": [LOGPROBS], "top_logprobs": 2}
    whole = await served.ask("My dog is called Rex.", **asked)
    chat = await served.client.chat.completions.create(
        model=MODEL.model_id,
        messages=[{"role": "user", "content": "My dog is called Rex."}],
        max_tokens=MOST,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert whole.top_logprobs == 2
    assert whole.output_text == chat.choices[0].message.content
    assert logprobs_of(whole) == [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    assert len(logprobs_of(whole)) == MOST
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs_of(whole))
    bare = await served.ask("My dog is called Rex.", store=False, include=[LOGPROBS])
    assert [entry["top_logprobs"] for entry in logprobs_of(bare)] == [[]] * MOST


async def test_a_stream_tells_each_with_its_text_and_all_at_the_end(served: Served) -> None:
    served.service.rig.runner.step_s = 0.02
    asked: dict[str, Any] = {"store": False, "include": [LOGPROBS], "top_logprobs": 1}
    asked["max_output_tokens"] = 40
    asked = {**GREEDY, **asked, "input": "My dog is called Rex."}
    whole = await served.client.responses.create(**asked)
    events = [event async for event in await served.client.responses.create(stream=True, **asked)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    told = [entry.model_dump() for event in deltas for entry in event.logprobs]
    assert [entry.model_dump() for entry in done.logprobs][: len(told)] == told
    assert len(deltas) > 1
    assert logprobs_of(events[-1].response) == logprobs_of(whole)
    assert [entry.logprob for entry in done.logprobs] == [entry["logprob"] for entry in logprobs_of(whole)]


async def test_a_stored_response_is_told_without_them(served: Served) -> None:
    first = await served.ask("one", include=[LOGPROBS])
    assert len(logprobs_of(first)) == MOST
    again = await served.client.responses.retrieve(first.id)
    assert logprobs_of(again) == []
    assert again.output_text == first.output_text
    sent = [item.model_dump(exclude_none=True) for item in first.output]
    second = await served.ask([{"role": "user", "content": "one"}, *sent, {"role": "user", "content": "two"}])
    assert len(served.service.cluster.sessions()) == 1, "they are no part of what was said"
    assert second.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"include": [LOGPROBS], "background": True}, "include"),
        ({"include": [LOGPROBS], "tools": [WEATHER]}, "include"),
    ],
)
async def test_where_they_cannot_be_told_they_are_refused(fields: dict[str, Any], param: str) -> None:
    service = TellingService("Rex.")
    async with openai_of(service) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(
                model=MODEL.model_id,
                input="one",
                **({"store": False} | fields | ({"store": True} if "background" in fields else {})),
            )
        assert caught.value.param == param
        assert service.calls == []


@pytest.mark.parametrize("finish", [TurnFinish("stop"), TurnFinish("length")])
@pytest.mark.parametrize("pieces", [(), ("",)])
async def test_an_answer_that_says_nothing_is_an_empty_message(
    pieces: tuple[str, ...], finish: TurnFinish
) -> None:
    """Such an answer used to have no item, and so no id from which a client could go on."""
    service = TellingService(*pieces, finish=finish)
    async with openai_of(service) as client:
        whole = await client.responses.create(model=MODEL.model_id, input="one", store=False)
        stream = await client.responses.create(model=MODEL.model_id, input="one", store=False, stream=True)
        last = [event async for event in stream][-1].response
    for response in (whole, last):
        (item,) = response.output
        assert (item.type, item.content[0].text) == ("message", "")
        assert item.id.startswith("msg_")
        assert item.status == ("completed" if finish.reason == "stop" else "incomplete")
