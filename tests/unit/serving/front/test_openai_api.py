"""OpenAI's protocol on the real turns of one replica, without a network."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from serving.front.api.openai.replies import stop_fields
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.reply_json import or_unset
from serving.wire.turns import ChatPrompt, TurnEvent, TurnFinish
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import MODEL, LocalService, shown_text, small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"role": "user", "content": "My dog is called Rex."}
GREEDY = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompt_ids(*messages: dict[str, str]) -> list[int]:
    return small_text().encode_prompt(ChatPrompt(messages))


async def test_chat(client: httpx.AsyncClient, service: LocalService) -> None:
    reply = await post(client, CHAT, {"model": MODEL.model_id, "messages": [HELLO], **GREEDY})
    choice = reply["choices"][0]
    expected = null_generate(prompt_ids(HELLO), 6, VOCAB_SIZE)
    assert choice["token_ids"] == expected
    assert choice["message"]["content"] == shown_text(expected)
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert reply["object"] == "chat.completion"
    assert service.calls[0].request_id == reply["id"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streaming_tells_the_same_as_a_whole_reply(client: httpx.AsyncClient, path: str) -> None:
    prompt = {"messages": [HELLO]} if path == CHAT else {"prompt": "My dog"}
    body = {**prompt, **GREEDY, "max_tokens": 20, "logprobs": True if path == CHAT else 2}
    whole = await post(client, path, body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(await client.post(path, json={**body, **options}))
    *news, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    choices = [chunk["choices"][0] for chunk in news]
    assert joined(choice["token_ids"] for choice in choices) == whole["choices"][0]["token_ids"]
    if path == CHAT:
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
        assert [choice["delta"].get("role") for choice in choices][:2] == ["assistant", None]
        logprobs = joined(c["logprobs"]["content"] for c in choices if c["logprobs"])
        assert logprobs == whole["choices"][0]["logprobs"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            told = joined(c["logprobs"][name] for c in choices if c["logprobs"])
            assert told == whole["choices"][0]["logprobs"][name]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_every_chunk(client: httpx.AsyncClient, path: str) -> None:
    prompt = {"messages": [HELLO]} if path == CHAT else {"prompt": "My dog"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    logprobs = True if path == CHAT else 1
    body = {**prompt, **GREEDY, "stream": True, "stream_options": options, "logprobs": logprobs}
    chunks = events_of(await client.post(path, json=body))
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert (told[0] > 0, told[-1]) == (True, GREEDY["max_tokens"])
    del options["include_usage"]
    chunks = events_of(await client.post(path, json=body))
    assert not any("usage" in chunk for chunk in chunks), "vLLM asks for both"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_hints_change_nothing(client: httpx.AsyncClient, path: str) -> None:
    prompt = {"messages": [HELLO]} if path == CHAT else {"prompt": "My dog"}
    hints: dict[str, Any] = {"store": True, "prompt_cache_retention": "24h", "service_tier": "flex"}
    hints |= {"metadata": {"a": "b"}, "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
    if path == CHAT:
        hints["verbosity"] = "low"
    hinted = await post(client, path, {**prompt, **GREEDY, **hints})
    assert hinted["choices"] == (await post(client, path, {**prompt, **GREEDY}))["choices"]


async def test_the_template_is_told_how_hard_to_think(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    body = {"messages": [HELLO], **GREEDY, "reasoning_effort": "low"}
    await post(client, CHAT, body)
    await post(client, CHAT, {**body, "chat_template_kwargs": {"reasoning_effort": "high", "a": 1}})
    asked = [call.prompt.template_kwargs for call in service.calls]
    assert asked == [{"reasoning_effort": "low"}, {"reasoning_effort": "high", "a": 1}]


async def test_a_session_takes_only_new_messages(client: httpx.AsyncClient, service: LocalService) -> None:
    seen = 0
    for turn in range(3):
        headers = {"x_session_id": "s-1", "x_session_mode": "append"}
        reply = await post(client, CHAT, {"messages": [HELLO], **GREEDY}, **headers)
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached in ((seen, seen - 1) if turn else (0,))
        assert usage["prompt_tokens"] > seen
        seen = usage["total_tokens"]
    assert [call.session.session_id for call in service.calls] == ["s-1"] * 3
    ledger = (await client.get("/v1/kedge/sessions")).json()["sessions"]
    assert [(row["session_id"], row["tokens"], row["turns"]) for row in ledger] == [("s-1", seen, 3)]
    assert (await client.get("/v1/kedge/sessions/s-1")).json()["tokens"] == seen
    assert (await client.delete("/v1/kedge/sessions/s-1")).status_code == 204
    assert (await client.delete("/v1/kedge/sessions/s-1")).status_code == 404
    await service.rig.books_are_empty()


async def test_a_turn_tried_again_runs_once(client: httpx.AsyncClient) -> None:
    headers = {"x-session-id": "s-1", "idempotency-key": "k-1"}
    body = {"messages": [HELLO], **GREEDY}
    first = await client.post(CHAT, json=body, headers=headers)
    second = await client.post(CHAT, json=body, headers=headers)
    assert second.json()["choices"] == first.json()["choices"]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    streamed = await client.post(CHAT, json={**body, "stream": True}, headers=headers)
    assert streamed.headers["idempotent-replayed"] == "true"
    other = await client.post(CHAT, json={**body, "max_tokens": 7}, headers=headers)
    assert other.status_code == 409
    assert other.json()["error"]["param"] == "idempotency-key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "Rex"})])
async def test_every_turn_says_which_of_its_session_it_is(
    client: httpx.AsyncClient, path: str, asked: dict[str, Any], stream: bool
) -> None:
    body = {**asked, **GREEDY, "stream": stream}

    async def turn(**headers: str) -> str | None:
        reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 200
        return reply.headers.get("x-session-turn")

    session = {"x-session-id": "s-1", "x-session-mode": "append"}
    assert [await turn(**session) for _ in range(3)] == ["0", "1", "2"]
    again = session | {"idempotency-key": "k"}
    assert [await turn(**again) for _ in range(2)] == ["3", "3"], "a replay is the turn that it was"
    await client.delete("/v1/kedge/sessions/s-1")
    assert await turn(**session) == "0", "it ended, and began anew"
    assert await turn() is None


async def test_text_completions_may_say_which_turn_they_are_to_be(client: httpx.AsyncClient) -> None:
    """Such a request used to get an answer, from a turn with another number."""
    headers = {"x-session-id": "s-1", "x-session-turn": "0"}
    body = {"prompt": [5], **GREEDY}
    first = await client.post(COMPLETIONS, json=body, headers=headers)
    assert (first.status_code, first.headers["x-session-turn"]) == (200, "0")
    again = await client.post(COMPLETIONS, json=body, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "turn_differs")
    assert again.json()["error"]["param"] == "x-session-turn"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages"])
async def test_a_turn_s_number_needs_a_session(client: httpx.AsyncClient, path: str) -> None:
    """The header used to be ignored, and the request was answered."""
    said = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": MODEL.model_id, "max_tokens": 1, **said}
    reply = await client.post(path, json=body, headers={"x-session-turn": "9"})
    assert (reply.status_code, "x-session-turn" in reply.text) == (400, True)


async def test_refused_turns_name_what_named_the_session(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    await client.post("/v1/kedge/sessions", json={"session_id": "small", "capacity_tokens": 8})
    await client.post("/v1/kedge/sessions", json={"session_id": "busy"})
    headers = {"x-session-id": "small"}
    full = await client.post(COMPLETIONS, json={"prompt": [5] * 9}, headers=headers)
    assert full.json()["error"]["code"] == "session_capacity_exceeded"
    assert full.json()["error"]["param"] == "prompt"
    service.rig.runner.step_s = 0.02
    headers = {"x-session-id": "busy"}
    long = {"prompt": [5], "max_tokens": 400, "stream": True}
    running = asyncio.create_task(client.post(COMPLETIONS, json=long, headers=headers))
    await service.rig.begun()
    refused = await client.post(COMPLETIONS, json={"prompt": [5]}, headers=headers)
    assert refused.json()["error"]["code"] == "turn_in_flight"
    assert refused.json()["error"]["param"] == "x-session-id"
    running.cancel()


@pytest.mark.parametrize(
    ("matched", "asked", "reason"),
    [(2, None, None), (2, [3], None), (2, [3, 2], 2), ("END", None, "END"), (None, [2], None)],
)
def test_stop_reason_is_what_the_request_named(
    matched: int | str | None, asked: list[int] | None, reason: int | str | None
) -> None:
    """As with vLLM, stop_reason is null where the model ends the answer itself."""
    body = OpenAiBody(stop_token_ids=asked)
    fields = stop_fields(body, TurnFinish("stop", matched), TurnEvent())
    assert fields["stop_reason"] == or_unset(reason)


async def test_choices_run_side_by_side(client: httpx.AsyncClient, service: LocalService) -> None:
    body = {"messages": [HELLO], "n": 3, "seed": 7, "max_tokens": 5, "return_token_ids": True}
    reply = await post(client, CHAT, body)
    assert [call.seed for call in service.calls] == [7, 8, 9]
    assert len({id(call.prompt) for call in service.calls}) == 1, "so it is hashed once"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 15
    assert reply["usage"]["prompt_tokens"] == len(prompt_ids(HELLO))
    chunks = events_of(await client.post(CHAT, json={**body, "stream": True}))
    for index, choice in enumerate(reply["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert joined(c["token_ids"] for c in mine) == choice["token_ids"]
        assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a dog", 1), (["a dog", "a park"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2), ([[5]], 1)],
)
async def test_every_kind_of_prompt(
    client: httpx.AsyncClient, service: LocalService, prompt: object, count: int
) -> None:
    reply = await post(client, COMPLETIONS, {"prompt": prompt, **GREEDY, "n": 2})
    assert len(reply["choices"]) == 2 * count
    assert reply["usage"]["completion_tokens"] == 12 * count
    if prompt == [5, 6, 7]:
        assert reply["choices"][0]["token_ids"] == null_generate([5, 6, 7], 6, VOCAB_SIZE)
    assert len({call.request_id for call in service.calls}) == 2 * count


async def test_echo(client: httpx.AsyncClient) -> None:
    text = "My dog is called Rex."
    ids = small_text()._encode(text, "prompt")
    for prompt in (text, ids):
        for logprobs in (None, 1):
            body = {"prompt": prompt, **GREEDY, "echo": True, "logprobs": logprobs}
            choice = (await post(client, COMPLETIONS, body))["choices"][0]
            assert choice["text"].startswith(text)
            if logprobs:
                assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"])
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert len(choice["logprobs"]["tokens"]) >= len(ids) + 6


@pytest.mark.parametrize("as_ids", [False, True])
async def test_text_offsets_are_characters_of_the_text(client: httpx.AsyncClient, as_ids: bool) -> None:
    text = "a🐶b"
    ids = small_text()._encode(text, "prompt")
    assert len(ids) > len(text), "a character of several tokens"
    body = {"prompt": ids if as_ids else text, **GREEDY, "echo": True, "logprobs": 0}
    choice = (await post(client, COMPLETIONS, body))["choices"][0]
    assert choice["text"].startswith(text)
    assert choice["logprobs"]["text_offset"][: len(ids)] == [0, *[1] * (len(ids) - 2), 2]
    chunks = events_of(await client.post(COMPLETIONS, json={**body, "stream": True}))
    streamed = joined(
        c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["logprobs"]
    )
    assert streamed == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_an_echo_of_token_ids_is_streamed_whole(
    client: httpx.AsyncClient, logprobs: int | None
) -> None:
    """A replica computes a long prompt in chunks, and tells the text of each. Only that of the first was echoed. A
    character may lie in two chunks."""
    text = "🐶" * 40
    ids = small_text()._encode(text, "prompt")
    assert len(ids) > 3 * 32
    body = {"prompt": ids, **GREEDY, "echo": True, "logprobs": logprobs}
    whole = (await post(client, COMPLETIONS, body))["choices"][0]["text"]
    assert whole.startswith(text)
    chunks = events_of(await client.post(COMPLETIONS, json={**body, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


async def test_a_prompt_can_be_scored_without_an_answer(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    for stream in (False, True):
        body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
        reply = await client.post(COMPLETIONS, json=body)
        choices = [c["choices"][0] for c in (events_of(reply) if stream else [reply.json()])]
        scores = joined(c["logprobs"]["token_logprobs"] for c in choices if c["logprobs"])
        assert len(scores) == 3
        assert scores[0] is None
        assert choices[-1]["finish_reason"] == "length"
    await service.rig.books_are_empty()


async def test_stop_strings(client: httpx.AsyncClient) -> None:
    body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 200}
    text = (await post(client, COMPLETIONS, body))["choices"][0]["text"]
    stop = text[10:13]
    cut = text.index(stop)
    for keep in (False, True):
        options = {"stop": [stop, "never said"], "include_stop_str_in_output": keep}
        choice = (await post(client, COMPLETIONS, {**body, **options}))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == text[: cut + len(stop) if keep else cut]
        chunks = events_of(await client.post(COMPLETIONS, json={**body, **options, "stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


async def test_messages_may_come_in_parts(client: httpx.AsyncClient, service: LocalService) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await post(client, CHAT, {"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert service.calls[0].prompt.messages == ({"role": "user", "content": "one\ntwo"},)


async def test_models(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL.model_id, 512)
    assert (await client.get(f"/v1/models/{MODEL.model_id}")).json() == card
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, service: LocalService) -> None:
    await client.post(
        COMPLETIONS,
        json={
            "prompt": "dog",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "seed": 3,
            "frequency_penalty": 1,
            "presence_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -100},
            "stop_token_ids": [9],
            "ignore_eos": True,
            "max_tokens": 1,
        },
    )
    call = service.calls[0]
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1, -1)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.1, {5: -100})
    assert (sampling.stop_token_ids, sampling.ignore_eos) == (frozenset({9}), True)
    assert (call.seed, call.max_new_tokens) == (3, 1)


@pytest.mark.parametrize("field", [{"logit_bias": {"5": 1, "999999": 1}}, {"allowed_token_ids": [5, 999999]}])
async def test_a_token_id_that_does_not_exist_is_named(
    client: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    """The place of an entry says nothing in a map: "entry 1" might be the token id 1."""
    reply = await client.post(CHAT, json={"messages": [HELLO], **field})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{next(iter(field))}: token id 999999 is outside the vocabulary of ")


async def test_without_a_limit_a_chat_may_fill_the_context(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    reply = await post(client, CHAT, {"messages": [HELLO], "temperature": 0})
    assert service.calls[0].max_new_tokens is None
    assert reply["usage"]["total_tokens"] == 512
