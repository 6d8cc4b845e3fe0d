"""SGLang's session protocol, as its clients use it, on the real turns of one replica."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front.api.rules import ApiRules
from serving.front.api.sessions.replies import GenerateEncoder
from serving.front.api.sessions.schema import GenerateBody
from serving.front.api.turn_streams import TurnPlan
from serving.front.http import create_http_app
from serving.wire.turns import TokenPrompt, TurnCall, TurnEvent, TurnFinish
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import LocalService, client_of, shown_text
from tests.unit.serving.replica_rig import VOCAB_SIZE

GREEDY = {"temperature": 0, "max_new_tokens": 6}


async def open_session(client: httpx.AsyncClient, **fields: Any) -> str:
    reply = await client.post(
        "/open_session", json={"capacity_of_str_len": 1000, "streaming": True, **fields}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def generate(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post("/generate", json={"sampling_params": GREEDY, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


async def test_turns_of_a_session(client: httpx.AsyncClient, service: LocalService) -> None:
    session = await open_session(client, streaming=True)
    history: list[int] = []
    for turn in range(4):
        new = [10 + turn, 20, 30]
        reply = await generate(client, input_ids=new, session_params={"id": session, "rid": None})
        expected = null_generate([*history, *new], 6, VOCAB_SIZE)
        assert reply["output_ids"] == expected
        assert reply["text"] == shown_text(expected)
        meta = reply["meta_info"]
        assert meta["prompt_tokens"] == len(history) + 3
        assert meta["cached_tokens"] in ((len(history), len(history) - 1) if turn else (0,))
        assert meta["completion_tokens"] == 6
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["e2e_latency"] > 0
        assert meta["id"] == service.calls[-1].request_id
        history += new + expected
    assert (await client.post("/close_session", json={"session_id": session})).status_code == 200
    assert (await client.post("/close_session", json={"session_id": "unknown"})).status_code == 200
    await service.rig.books_are_empty()


async def test_streams_tell_the_whole_text_so_far(client: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    whole = (await client.post("/generate", json=body)).json()
    reply = await client.post("/generate", json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert done == "[DONE]"
    told = [json.loads(event) for event in events]
    for earlier, later in itertools.pairwise(told):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    assert (told[-1]["text"], told[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}


async def test_logprobs(client: httpx.AsyncClient) -> None:
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = (await generate(client, input_ids=[5, 6, 7], **options))["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [None] * 6
    assert len(meta["output_top_logprobs"]) == 6
    named = await generate(client, input_ids=[5, 6], return_logprob=True, return_text_in_logprobs=True)
    assert all(isinstance(entry[2], str) for entry in named["meta_info"]["output_token_logprobs"])
    assert named["meta_info"]["input_token_logprobs"] == []
    assert "output_token_logprobs" not in (await generate(client, input_ids=[5]))["meta_info"]


async def test_incremental_streams_tell_what_is_new(service: LocalService) -> None:
    """Each event used to repeat all text before it: 400 tokens took 276 kB."""
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
    app = create_http_app(service, rules=ApiRules(incremental_streaming_output=True))
    async with client_of(app) as client:
        whole = (await client.post("/generate", json=body)).json()
        stream = (await client.post("/generate", json={**body, "stream": True})).text
    *events, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert done == "[DONE]"
    told = [json.loads(event) for event in events]
    assert len(told) > 1
    assert "".join(event["text"] for event in told) == whole["text"]
    assert [token for event in told for token in event["output_ids"]] == whole["output_ids"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        assert [entry for event in told for entry in event["meta_info"][name]] == whole["meta_info"][name]
    counts = [event["meta_info"]["completion_tokens"] for event in told]
    assert counts[-1] == whole["meta_info"]["completion_tokens"]
    assert counts == sorted(counts)


async def test_a_long_stream_that_repeats_is_not_its_length_squared() -> None:
    """Each token used to have its own event, which repeated all tokens before: 4,000 tokens took 61 MB."""
    body = GenerateBody(input_ids=[1], stream=True)
    call = TurnCall("r", TokenPrompt((1,)), SamplingParams(20_000))
    encoder = GenerateEncoder(body, TurnPlan([call]), numbered=False, incremental=False)
    events = [TurnEvent("abc", (number,)) for number in range(20_000)]
    events[-1] = replace(events[-1], finish=TurnFinish("length"))
    chunks = [await encoder.chunk(0, event) for event in events]
    told = [chunk for chunk in chunks if chunk]
    assert all((*chunks[:128], chunks[-1]))
    assert json.loads(told[-1].removeprefix(b"data: "))["output_ids"] == list(range(20_000))
    assert sum(map(len, told)) < 1.1 * 128 * len(told[-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_later_turn_begin_where_they_are_asked_for(
    client: httpx.AsyncClient, service: LocalService, stream: bool
) -> None:
    """SGLang's clients send 0 in every turn. The whole history is scored then, and the session goes on as usual."""
    session = {"session_params": {"id": await open_session(client)}}
    history: list[int] = []
    for turn, start in enumerate((0, 0, 5, 0, 12, 43)):
        new = [10 + turn, 20, 30]
        body = {"input_ids": new, "sampling_params": GREEDY, "stream": stream, **session}
        asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        reply = await client.post("/generate", json={**body, **asked})
        assert reply.status_code == 200, reply.text
        text = reply.text.split("\n\n")[-3].removeprefix("data: ") if stream else reply.text
        told = json.loads(text)
        assert told["output_ids"] == null_generate([*history, *new], 6, VOCAB_SIZE)
        meta = told["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == [*history, *new][start:]
        assert len(meta["input_top_logprobs"]) == len(history) + 3 - start
        assert [entry[0] is None for entry in meta["input_token_logprobs"]].count(True) == (start == 0)
        assert meta["prompt_tokens"] == len(history) + 3
        history += new + told["output_ids"]
    plain = await generate(client, input_ids=[9], **session)
    assert plain["meta_info"]["cached_tokens"] == len(history) - 1
    error = await refused(
        client, "/generate", input_ids=[9], return_logprob=True, logprob_start_len=500, **session
    )
    assert (error["param"], error["code"]) == ("logprob_start_len", "invalid_request")
    await client.post("/close_session", json={"session_id": session["session_params"]["id"]})
    await service.rig.books_are_empty()


async def test_a_turn_may_only_take_in_its_input(client: httpx.AsyncClient) -> None:
    session = {"session_params": {"id": await open_session(client)}}
    nothing = {"temperature": 0, "max_new_tokens": 0}
    reply = await generate(client, input_ids=[5, 6, 7], sampling_params=nothing, **session)
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    reply = await generate(client, input_ids=[8], **session)
    assert reply["output_ids"] == null_generate([5, 6, 7, 8], 6, VOCAB_SIZE)
    assert reply["meta_info"]["cached_tokens"] in (2, 3)


async def test_sglangs_load_client_is_served(client: httpx.AsyncClient) -> None:
    """Its `bench_serving` names some fields in order to ask for nothing."""
    body = {
        "text": "dog",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
        "stream": False,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    assert (await generate(client, **body))["meta_info"]["completion_tokens"] == 6
    error = await refused(client, "/generate", **(body | {"return_routed_experts": True}))
    assert (error["param"], error["code"]) == ("return_routed_experts", "unsupported_field")


async def test_batches(client: httpx.AsyncClient) -> None:
    replies = await generate(client, input_ids=[[5, 6, 7], [8]], rid=["a", "b"])
    assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b"]
    expected = [null_generate(ids, 6, VOCAB_SIZE) for ids in ([5, 6, 7], [8])]
    assert [reply["output_ids"] for reply in replies] == expected
    assert len(await generate(client, text=["a dog", "a park", "Rex"])) == 3
    assert len(await generate(client, text="a dog", sampling_params={**GREEDY, "n": 2})) == 2
    assert isinstance(await generate(client, text=["a dog"]), list)
    reply = await client.post(
        "/generate", json={"input_ids": [[5, 6, 7], [8]], "sampling_params": GREEDY, "stream": True}
    )
    last: dict[int, Any] = {}
    for line in reply.text.split("\n\n")[:-2]:
        event = json.loads(line.removeprefix("data: "))
        last[event["index"]] = event
    assert [last[i]["output_ids"] for i in range(2)] == expected


async def test_prompts_of_a_batch_may_have_their_own_sampling(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    own = [
        {**GREEDY, "seed": 5},
        {"temperature": 0, "max_new_tokens": 3, "stop": ["ab"], "no_stop_trim": True},
    ]
    replies = await generate(client, input_ids=[[5, 6, 7], [8]], sampling_params=own)
    assert [len(reply["output_ids"]) for reply in replies] == [6, 3]
    first, second = service.calls
    assert (first.seed, first.stop, first.trim_stop) == (5, (), True)
    assert (second.seed, second.stop, second.trim_stop) == (None, ("ab",), False)
    many = await generate(client, text=["a", "b"], sampling_params=[{**each, "n": 2} for each in own])
    assert [len(reply["output_ids"]) for reply in many] == [6, 6, 3, 3]
    assert [call.seed for call in service.calls[2:]] == [5, 6, None, None]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ([], "sampling_params"),
        ([GREEDY], "sampling_params"),
        ([GREEDY, {"n": 2}], "sampling_params"),
        ([GREEDY, {"stop_token_ids": [VOCAB_SIZE]}], "sampling_params[1].stop_token_ids"),
        ([GREEDY, {"json_schema": "{"}], "sampling_params[1].json_schema"),
        ([GREEDY, {"top_p": 2}], "sampling_params[1].top_p"),
    ],
)
async def test_wrong_sampling_of_a_batch_is_named(
    client: httpx.AsyncClient, sampling: Any, param: str
) -> None:
    error = await refused(client, "/generate", text=["a", "b"], sampling_params=sampling)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_session_is_not_named_as_a_part_that_paths_leave_out(
    client: httpx.AsyncClient, service: LocalService, name: str
) -> None:
    """Nobody could have read, forked or ended it by its path."""
    sessions = "/v1/kedge/sessions"
    error = await refused(client, "/open_session", capacity_of_str_len=9, session_id=name)
    assert error["param"] == "session_id"
    assert (await refused(client, sessions, session_id=name))["param"] == "session_id"
    body = {"messages": [{"role": "user", "content": "a"}]}
    reply = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": name})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-session-id")
    session = await open_session(client, session_id=f"{name}a")
    fork = await refused(client, f"{sessions}/{session}/fork", new_session_id=name)
    assert fork["param"] == "new_session_id"
    assert [each.session_id for each in service.cluster.sessions()] == [session]


async def busy_turn(client: httpx.AsyncClient, service: LocalService, **body: Any) -> asyncio.Task[Any]:
    """Starts a turn that runs until something ends it."""
    service.rig.runner.step_s = 0.02
    sampling = {"temperature": 0, "max_new_tokens": 400}
    running = asyncio.create_task(generate(client, input_ids=[5], sampling_params=sampling, **body))
    await service.rig.begun()
    return running


async def test_aborting_a_turn(client: httpx.AsyncClient, service: LocalService) -> None:
    session = await open_session(client)
    await generate(client, input_ids=[5, 6, 7], session_params={"id": session})
    for body in ({"rid": "r-1"}, {"rid": "", "abort_all": True}):
        running = await busy_turn(client, service, rid="r-1", session_params={"id": session})
        error = await refused(client, "/generate", input_ids=[1], session_params={"id": session})
        assert (error["code"], error["param"]) == ("turn_in_flight", "session_params.id")
        assert (await client.post("/flush_cache")).status_code == 400
        assert (await client.post("/abort_request", json=body)).status_code == 200
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    service.rig.runner.step_s = 0.0
    reply = await generate(client, input_ids=[8, 9], session_params={"id": session})
    assert reply["meta_info"]["prompt_tokens"] == 3 + 6 + 2
    assert (await client.post("/flush_cache")).status_code == 200


@pytest.mark.parametrize(
    ("several", "num_calls"),
    [
        ({"input_ids": [5], "sampling_params": {"n": 2}}, 2),
        ({"input_ids": [[5], [6]], "sampling_params": {}}, 2),
        ({"input_ids": [[5], [6]], "sampling_params": {"n": 2}}, 4),
    ],
    ids=["choices", "prompts", "both"],
)
async def test_an_abort_ends_all_generations_of_its_request(
    client: httpx.AsyncClient, service: LocalService, several: dict[str, Any], num_calls: int
) -> None:
    """It ended none: each generation had an id of its own. Others whose ids only begin alike go on."""
    service.rig.runner.step_s = 0.02
    endless = {"temperature": 0, "max_new_tokens": 400, **several["sampling_params"]}
    body = {**several, "rid": "a", "sampling_params": endless}
    others = {
        "input_ids": [7],
        "rid": "a_x",
        "sampling_params": {"temperature": 0, "max_new_tokens": 400},
    }
    running, other = (asyncio.create_task(generate(client, **each)) for each in (body, others))
    async with asyncio.timeout(10):
        while service.rig.turns.num_live < num_calls + 1:
            await asyncio.sleep(0)
    assert (await client.post("/abort_request", json={"rid": "a"})).status_code == 200
    ends = [each["meta_info"]["finish_reason"]["type"] for each in await running]
    assert ends == ["abort"] * num_calls
    service.rig.runner.step_s = 0.0
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
        ("/v1/completions", {"prompt": [[5], [6]]}),
    ],
)
async def test_an_abort_by_a_replys_id_ends_all_its_choices(
    client: httpx.AsyncClient, service: LocalService, path: str, body: dict[str, Any]
) -> None:
    """A client knows the id from the first event of a stream."""
    service.rig.runner.step_s = 0.02
    body = {**body, "max_tokens": 400, "temperature": 0}
    running = asyncio.create_task(client.post(path, json=body))
    async with asyncio.timeout(10):
        while service.rig.turns.num_live < 2:
            await asyncio.sleep(0)
    reply_id = service.calls[-1].request_id.removesuffix("-1")
    await client.post("/abort_request", json={"rid": reply_id})
    reply = (await running).json()
    assert reply["id"] == reply_id
    assert reply["usage"]["completion_tokens"] < 400


async def test_a_tenant_aborts_its_own_turns_only(client: httpx.AsyncClient, service: LocalService) -> None:
    running = await busy_turn(client, service, rid="r-1")
    for body in ({"rid": "r-1"}, {"abort_all": True}):
        aborted = await client.post("/abort_request", json=body, headers={"x-tenant-id": "other"})
        assert aborted.status_code == 200
    service.rig.runner.step_s = 0.0
    assert (await running)["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [{"text": "Rex"}, {"input_ids": [[5, 6]]}])
async def test_every_turn_says_which_of_its_session_it_is(
    client: httpx.AsyncClient, prompt: dict[str, Any], stream: bool
) -> None:
    session = await open_session(client)
    body = {**prompt, "sampling_params": GREEDY, "stream": stream, "session_params": {"id": session}}
    replies = [await client.post("/generate", json=body) for _ in range(3)]
    assert [reply.headers["x-session-turn"] for reply in replies] == ["0", "1", "2"]
    reply = await client.post("/generate", json={**prompt, "sampling_params": GREEDY})
    assert "x-session-turn" not in reply.headers


async def test_refusals_say_400_and_why(client: httpx.AsyncClient) -> None:
    session = await open_session(client, session_id="mine", timeout=60)
    assert session == "mine"
    assert (
        "open already"
        in (await refused(client, "/open_session", capacity_of_str_len=1, session_id="mine"))["message"]
    )
    unknown = await refused(client, "/generate", input_ids=[1], session_params={"id": "nobody"})
    assert unknown["code"] == "session_not_found"
    for name in ("offset", "replace", "drop_previous_output"):
        params = {"id": "mine", name: 3 if name == "offset" else True}
        error = await refused(client, "/generate", input_ids=[1], session_params=params)
        assert error["param"] == f"session_params.{name}"
    long = await refused(client, "/generate", input_ids=[1] * 600, session_params={"id": "mine"})
    assert "context length" in long["message"]
    assert long["param"] == "input_ids"
    await generate(client, input_ids=[1], session_params={"id": "mine"})
    two = await refused(client, "/generate", input_ids=[[1], [2]], session_params={"id": "mine"})
    assert two["param"] == "input_ids"
    choices = {"input_ids": [1], "sampling_params": {"n": 2}}
    error = await refused(client, "/generate", **choices, session_params={"id": "mine"})
    assert error["param"] == "sampling_params.n"


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/get_server_info", "/metrics"])
async def test_looking_in(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.get(path)
    assert reply.status_code == 200, reply.text


async def test_model_info(client: httpx.AsyncClient) -> None:
    info = (await client.get("/get_model_info")).json()
    assert info["model_path"] == info["tokenizer_path"] == "/models/null"
    assert info["is_generation"] is True
    assert "kedge_" in (await client.get("/metrics")).text
