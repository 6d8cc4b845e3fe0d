"""Odd bytes in headers and addresses, sent over a socket and as another ASGI server would pass them on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService
from tests.unit.serving.served_service import ServedService, served_service

HEADERS = (
    "x-session-id", "x-tenant-id", "x-session-mode", "x-session-turn", "idempotency-key", "x-stainless-retry-count",
    "content-type", "content-encoding", "authorization", "x-api-key", "origin", "accept", "cookie", "expect", "upgrade",
    "x-request-id", "traceparent", "anthropic-version", "anthropic-beta", "x-forwarded-for", "forwarded", "range", "te",
)  # fmt: skip
CALLS = (
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2}'),
    ("/v1/completions", b'{"prompt":"a","max_tokens":2,"stream":true}'),
    ("/v1/responses", b'{"input":"a","max_output_tokens":2}'),
    ("/v1/messages", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2}'),
    ("/generate", b'{"text":"a","sampling_params":{"max_new_tokens":2}}'),
    ("/tokenize", b'{"prompt":"a"}'),
    ("/v1/kedge/sessions", b"{}"),
)
WORDS = (
    b"application/json",
    b"Bearer ",
    b"=",
    b'"',
    b"\\",
    b";",
    b"charset=utf-16",
    b"[",
    b":",
    b"append",
    b"1",
    b"-",
)
NO_HTTP = b"Invalid HTTP request received."
"""uvicorn's answer to bytes that are no HTTP request. Nothing of them reaches the application."""

# A header's value may have any bytes except line ends and NUL, which end or break a request.
odd_values = st.one_of(
    st.binary(max_size=12),
    st.lists(st.sampled_from(WORDS) | st.binary(max_size=2), max_size=6).map(b"".join),
    st.sampled_from([b"9" * 400, b"\xff" * 300, "ä".encode(), b"\xe2\x80\xa8", b"\xed\xa0\x80"]),
).map(lambda value: re.sub(rb"[\r\n\0]", b"", value))
odd_headers = st.lists(st.tuples(st.sampled_from(HEADERS), odd_values), max_size=3)
odd_segments = st.text(max_size=6) | st.sampled_from(
    ["..", "%2e%2e", "%00", "%0d%0a", "%ff", "//", "a%2ffork", "*"]
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedService]:
    with served_service(tmp_path_factory.mktemp("served")) as served:
        yield served


def _refused_or_answered(path: str, reply: bytes) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert status < 500, reply
    if status >= 400 and body != NO_HTTP and body:
        error = json.loads(body)["error"]
        assert error["message"]
        named = {"code", "message", "param"} if not path.startswith("/v1/") else {"message", "type"}
        assert named <= error.keys()


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(call=st.sampled_from(CALLS), headers=odd_headers)
def test_header_bytes_are_answered(
    served: ServedService, call: tuple[str, bytes], headers: list[tuple[str, bytes]]
) -> None:
    path, body = call
    lines = [f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode()]
    if "content-type" not in dict(headers):
        lines.append(b"content-type: application/json\r\n")
    lines += [b"%s: %s\r\n" % (name.encode(), value) for name, value in headers]
    lines.append(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    _refused_or_answered(path, served.raw_call(b"".join(lines)))


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    place=st.sampled_from(["/v1/kedge/sessions/", "/v1/responses/", "/v1/models/", "/v1/kedge/replicas/", "/"]),
    segment=odd_segments,
    end=st.sampled_from(["", "/fork", "/rewind", "/drain", "/input_items", "/"]),
    query=st.one_of(st.just(b""), st.sampled_from([b"limit=", b"after=", b"include=", b"="]).flatmap(
        lambda name: odd_values.map(lambda value: b"?" + name + value)
    )),
    method=st.sampled_from([b"GET", b"POST", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"]),
)  # fmt: skip
def test_addresses_of_any_bytes_are_answered(
    served: ServedService, place: str, segment: str, end: str, query: bytes, method: bytes
) -> None:
    address = (place + segment + end).encode("utf-8", "surrogatepass") + query
    address = re.sub(rb"[\s\0]", b"%20", address)
    request = b"%s %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (
        method,
        address,
    )
    _refused_or_answered(place, served.raw_call(request))


@pytest.mark.parametrize(
    "path", ["/v1/kedge/sessions", "/v1/models/none", "/v1/messages", "/generate", "/nowhere"]
)
async def test_a_query_of_any_bytes_is_no_error_of_the_servers(service: LocalService, path: str) -> None:
    """uvicorn lets no bytes through that are not ASCII, but another server may."""
    app = create_http_app(service)
    replies: list[Any] = []

    async def send(message: Any) -> None:
        replies.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": path, "root_path": "",
        "raw_path": path.encode(), "query_string": b"limit=\xff&\xfe=1", "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"localhost")], "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    assert 400 <= replies[0]["status"] < 500
    assert json.loads(replies[1]["body"])["error"]["message"]
