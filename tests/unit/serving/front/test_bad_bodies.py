"""Bad input gives a 4xx in the protocol's shape that names the field. It changes nothing in the books."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from serving.front.api.body_limits import BodyLimits
from serving.front.api.rules import ApiRules
from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, client_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
OPEN = "/open_session"
HELLO = {"role": "user", "content": "hi"}
HUGE = 10**30
SEARCHED = {"type": "custom", "custom": {"name": "f", "format": {"type": "web_search"}}}
CALL_OF_SEARCH = {"role": "assistant", "tool_calls": [{"id": "c", "type": "web_search"}]}
NO_SERVICE: Any = None
"""Bad bodies never reach a service."""

FORMAT_SCHEMA = "response_format.json_schema.schema"
GENERATE_SCHEMA = "sampling_params.json_schema"


def held(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{**HELLO, "weight": 1}]}, "messages[0].weight"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "messages[0]",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "messages[0].content[0].refusal",
    ),
    (CHAT, {"messages": [HELLO], "functions": [{}]}, "functions"),
    (CHAT, {"messages": [HELLO], "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": [HELLO], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": [HELLO], "response_format": held({"type": "strin"})}, FORMAT_SCHEMA),
    (CHAT, {"messages": [HELLO], "response_format": held({"not": {}})}, FORMAT_SCHEMA),
    (CHAT, {"messages": [HELLO], "response_format": held({"title": "x" * 70_000})}, FORMAT_SCHEMA),
    (CHAT, {"messages": [HELLO], "response_format": held([])}, FORMAT_SCHEMA),
    (
        CHAT,
        {"messages": [HELLO], "response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
        FORMAT_SCHEMA,
    ),
    (
        CHAT,
        {"messages": [HELLO], "response_format": {**held({}), "type": "json_object"}},
        "response_format.json_schema",
    ),
    (COMPLETIONS, {"prompt": "a", "response_format": held({"not": {}})}, FORMAT_SCHEMA),
    (CHAT, {"messages": [HELLO], "structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    (CHAT, {"messages": [HELLO], "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (CHAT, {"messages": [HELLO], "structured_outputs": {}}, "structured_outputs"),
    (CHAT, {"messages": [HELLO], "structured_outputs": {"json_object": False}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"choice": ["a", ""]}},
        "structured_outputs.choice[1]",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"choice": ["x" * 70_000]}},
        "structured_outputs.choice",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"grammar": "start: x"}},
        "structured_outputs.grammar",
    ),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}},
        "structured_outputs.regex",
    ),
    (
        CHAT,
        {
            "messages": [HELLO],
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs.regex",
    ),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "{"}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "[]"}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": 7}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": '{"not": {}}'}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": {"not": {}}}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": '{"a": "\\ud800"}'}}, GENERATE_SCHEMA),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a" * 70_000}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a", "json_schema": {}}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
    (CHAT, {"messages": [HELLO], "modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"messages": [HELLO], "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": [HELLO], "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [HELLO], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": [HELLO], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": [HELLO], "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": [HELLO], "stream": "yes"}, "stream"),
    (CHAT, {"messages": [HELLO], "n": 0}, "n"),
    (CHAT, {"messages": [HELLO], "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": [HELLO], "frobnicate": 1}, "frobnicate"),
    (CHAT, {"messages": [HELLO], "model": 7}, "model"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 1000]}, "prompt"),
    (COMPLETIONS, {"prompt": [HUGE]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [1000]]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [5] * 600}, "prompt"),
    (COMPLETIONS, {"prompt": "dog " * 600}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 3}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {"not": {}}}, "guided_json"),
    *[
        (COMPLETIONS, {"prompt": "a", name: value}, name)
        for name, values in {
            "max_tokens": (-1, HUGE, 1.5, "5", True, [5]),
            "temperature": (-0.1, HUGE, "1", [], True),
            "top_p": (0, 1.1, -1, "x"),
            "top_k": (-2, HUGE, 1.5),
            "min_p": (-0.1, 1.1),
            "seed": (HUGE, -HUGE, 0.5, "1"),
            "n": (0, -1, 129, HUGE),
            "frequency_penalty": (-2.1, 2.1, "x"),
            "presence_penalty": (-2.1, 2.1),
            "repetition_penalty": (0, -1, HUGE, 1e-39),
            "stop": ("", 5, {}, ["x"] * 17, "x" * 257),
            "stop_token_ids": ([-1], [1000], 5, [HUGE]),
            "logit_bias": ({"1000": 1}, [5], {"9" * 9: 1}),
        }.items()
        for value in values
    ],
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "stop[1]"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    (GENERATE, {}, "input_ids"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "input_ids"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"text": 5}, "text"),
    (GENERATE, {"input_ids": []}, "input_ids"),
    (GENERATE, {"input_ids": [[]]}, "input_ids[0]"),
    (GENERATE, {"input_ids": [-1]}, "input_ids"),
    (GENERATE, {"input_ids": [1000]}, "input_ids"),
    (GENERATE, {"input_ids": ["a"]}, "input_ids[0]"),
    (GENERATE, {"input_ids": [5] * 600}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": 7}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"warmth": 1}}, "sampling_params.warmth"),
    (
        GENERATE,
        {"text": "a", "sampling_params": {"stop_token_ids": [1000]}},
        "sampling_params.stop_token_ids",
    ),
    (GENERATE, {"text": "a", "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"text": "a", "session_params": {}}, "session_params.id"),
    (GENERATE, {"text": "a", "session_params": {"id": ""}}, "session_params.id"),
    (GENERATE, {"text": "a", "session_params": {"id": "s", "offset": 0.5}}, "session_params.offset"),
    (GENERATE, {"text": "a", "session_params": {"id": "s", "offset": "1"}}, "session_params.offset"),
    (GENERATE, {"text": "a", "image_data": "x"}, "image_data"),
    (GENERATE, {"text": "a", "wish": "x"}, "wish"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    (GENERATE, {"input_ids": [5], "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len"),
    (OPEN, {}, "capacity_of_str_len"),
    (OPEN, {"capacity_of_str_len": -1}, "capacity_of_str_len"),
    (OPEN, {"capacity_of_str_len": 1, "streaming": True, "timeout": 0}, "timeout"),
    (OPEN, {"capacity_of_str_len": 1, "streaming": True, "session_id": "a b"}, "session_id"),
    (OPEN, {"capacity_of_str_len": 1, "streaming": True, "session_id": "a" * 257}, "session_id"),
    ("/close_session", {}, "session_id"),
    ("/abort_request", {}, "rid"),
    ("/v1/kedge/sessions", {"timeout_s": -1}, "timeout_s"),
]


def check_shape(path: str, reply: httpx.Response) -> dict[str, Any]:
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text)
    error = reply.json()["error"]
    keys = {"message", "param", "code"} | ({"type"} if path.startswith("/v1/") else set())
    assert set(error) == keys
    assert error["message"]
    assert len(error["message"]) < 500
    return error


async def test_bad_fields_are_named(client: httpx.AsyncClient, service: LocalService) -> None:
    for path, body, param in BAD:
        reply = await client.post(path, json=body)
        error = check_shape(path, reply)
        assert reply.status_code == 400, (path, body, reply.text)
        assert error["param"] == param, (path, body, error)
    await service.rig.books_are_empty()
    assert (await client.get("/v1/kedge/sessions")).json()["sessions"] == []


NOT_JSON = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 5000,
    b'{"prompt": [' + b"9" * 5000 + b"]}",
    b"\x00",
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, OPEN])
async def test_what_is_not_json(path: str) -> None:
    async with client_of(create_http_app(NO_SERVICE)) as client:
        for raw in NOT_JSON:
            reply = await client.post(path, content=raw, headers={"content-type": "application/json"})
            check_shape(path, reply)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_what_is_not_declared_as_json(path: str) -> None:
    async with client_of(create_http_app(NO_SERVICE)) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            reply = await client.post(path, content=b'{"text": "a"}', headers={"content-type": kind})
            assert "application/json" in check_shape(path, reply)["message"]


@pytest.mark.parametrize("path", [CHAT, GENERATE, "/v1/kedge/sessions"])
async def test_an_encoded_body_is_refused_by_its_encoding(path: str) -> None:
    async with client_of(create_http_app(NO_SERVICE)) as client:
        headers = {"content-type": "application/json", "content-encoding": "GZip"}
        reply = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
        assert reply.status_code == 415
        assert "content-encoding: 'gzip'" in check_shape(path, reply)["message"]
        plain = await client.post(path, json=[], headers={"content-encoding": "identity"})
        assert "JSON object" in check_shape(path, plain)["message"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search", "size": 1}]}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
        ("messages[0].tool_calls[0].type", {"messages": [CALL_OF_SEARCH]}),
        ("tools[0].custom.format.type", {"tools": [SEARCHED]}),
    ],
)
async def test_an_unknown_type_of_tool_is_refused_by_its_name(field: str, body: dict[str, Any]) -> None:
    """It used to be told that 'function' is expected, as if custom tools were refused, too."""
    async with client_of(create_http_app(NO_SERVICE)) as client:
        error = check_shape(CHAT, await client.post(CHAT, json={"messages": [HELLO], **body}))
        assert (error["param"], error["code"]) == (field, "unsupported_field")
        assert error["message"] == f"{field}: 'web_search' is not supported here."


@pytest.mark.parametrize("path", ["/v1/completions", GENERATE])
@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_have_a_limit(path: str, declared: bool) -> None:
    app = create_http_app(NO_SERVICE, rules=ApiRules(body_limits=lambda: BodyLimits(size_bytes=1000)))
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with client_of(app) as client:
        headers = {"content-type": "application/json"}
        reply = await client.post(path, content=body if declared else pieces(), headers=headers)
        assert reply.status_code == 413
        check_shape(path, reply)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", GENERATE, 405),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    async with client_of(create_http_app(NO_SERVICE)) as client:
        reply = await client.request(method, path)
        assert reply.status_code == status
        check_shape(path, reply)


@pytest.mark.parametrize("name", ["x-session-id", "idempotency-key", "x-tenant-id"])
@pytest.mark.parametrize(
    "value",
    [b"", b"a b", "ä".encode(), b"a" * 257, b"\xff\xfe", b"\xc3", b"a\x80b"],
    ids=lambda value: value[:8],
)
async def test_bad_headers_are_named(name: str, value: bytes) -> None:
    async with client_of(create_http_app(NO_SERVICE)) as client:
        reply = await client.post(CHAT, json={"messages": [HELLO]}, headers={name: value})
        assert reply.status_code == 400
        assert check_shape(CHAT, reply)["param"] == name


@pytest.mark.parametrize(
    "body", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}, {"prompt": "a", "echo": True}]
)
async def test_a_session_takes_one_plain_generation(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    reply = await client.post(COMPLETIONS, json=body, headers={"x-session-id": "s"})
    assert check_shape(COMPLETIONS, reply)["param"] in body
    assert (await client.get("/v1/kedge/sessions")).json()["sessions"] == []


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8).map(lambda text: text.encode("utf-8", "replace").decode()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = {
    CHAT: ["messages", "logprobs", "top_logprobs", "max_completion_tokens", "tools", "tool_choice"],
    COMPLETIONS: ["prompt", "logprobs", "echo", "best_of", "suffix", "add_special_tokens"],
    GENERATE: ["text", "input_ids", "rid", "sampling_params", "session_params", "return_logprob"],
    OPEN: ["capacity_of_str_len", "session_id", "timeout", "streaming"],
}
SAMPLING = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "structured_outputs",
    "json_schema",
    "regex",
]
GOOD = {
    CHAT: {"messages": [HELLO], "max_tokens": 2, "tools": [{"type": "function", "function": {"name": "f"}}]},
    COMPLETIONS: {"prompt": [5], "max_tokens": 2},
    GENERATE: {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
    OPEN: {"capacity_of_str_len": 5, "streaming": True},
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A good body with some spoilt fields, so that some bodies pass validation and reach the code after it."""
    path = draw(st.sampled_from(sorted(FIELDS)))
    spoilt = draw(st.dictionaries(st.sampled_from(FIELDS[path]), json_values, max_size=2))
    sampling = draw(st.dictionaries(st.sampled_from([*SAMPLING, "?"]), json_values, max_size=2))
    if path == GENERATE:
        inner = {"max_new_tokens": 2, **sampling}
        return path, {**GOOD[path], "sampling_params": inner, **spoilt}
    return path, {**GOOD[path], **spoilt, **(sampling if path != OPEN else {})}


async def test_no_body_makes_a_server_error(client: httpx.AsyncClient, service: LocalService) -> None:
    examples: list[tuple[str, dict[str, Any]]] = []
    seed_used = random.SystemRandom().randrange(2**32)
    print(f"seed {seed_used}")  # noqa: T201 - after a failure, it repeats the bodies

    @seed(seed_used)
    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def gather(example: tuple[str, dict[str, Any]]) -> None:
        examples.append(example)

    gather()
    outcomes = {True: 0, False: 0}
    replies = await asyncio.gather(*[client.post(path, json=body) for path, body in examples])
    for (path, body), reply in zip(examples, replies, strict=True):
        assert reply.status_code < 500, (seed_used, path, body, reply.text)
        if reply.status_code != 200:
            check_shape(path, reply)
        outcomes[reply.status_code == 200] += 1
    assert min(outcomes.values()) > 20, (seed_used, outcomes)
    for session in (await client.get("/v1/kedge/sessions")).json()["sessions"]:
        await client.delete(f"/v1/kedge/sessions/{session['session_id']}")
    await service.rig.books_are_empty()
