"""Clients that send or read too slowly, over real connections: each is disconnected within a bounded time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from serving.front.api import sse, strict_json
from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, http_server, local_service

WAIT_S = 20.0
CHAT = "/v1/chat/completions"
MEGABYTES = {
    "text": "a",
    "stream": True,
    "return_logprob": True,
    "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 480, "ignore_eos": True},
}
"""The stream is larger than what the system buffers for a client that does not read: each event repeats all before
it."""
ASKED = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[LocalService, str, int]]:
    async with local_service(directory) as service, http_server(create_http_app(service)) as url:
        address = urlsplit(url)
        yield service, address.hostname or "", address.port or 0


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


async def test_a_body_that_comes_too_slowly_is_answered_408(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a request used to keep its place in the front end for as long as its client liked."""
    monkeypatch.setattr(strict_json, "BODY_PATIENCE_S", 0.3)
    async with asyncio.timeout(WAIT_S), served(tmp_path) as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head(CHAT, 1000))
        for _ in range(3):  # what is sent after the server has closed would cost the answer
            writer.write(b" ")
            await asyncio.sleep(0.05)
        answer = await reader.read()  # reads to the end of the connection
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"


async def test_a_body_may_take_the_time_that_its_length_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_json, "BODY_PATIENCE_S", 0.5)
    monkeypatch.setattr(strict_json, "BODY_BYTES_PER_S", 100)
    async with asyncio.timeout(WAIT_S), served(tmp_path) as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps(ASKED | {"stream": False, "max_tokens": 2, "user": "u" * 2000}).encode()
        writer.write(head(CHAT, len(body)) + body[:1000])
        await asyncio.sleep(0.7)
        writer.write(body[1000:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_stream_that_nobody_reads_ends_and_leaves_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client had not read used to stay in the front end for as long as the client liked."""
    monkeypatch.setattr(sse, "SEND_PATIENCE_S", 0.3)
    async with asyncio.timeout(WAIT_S), served(tmp_path) as (service, host, port):
        body = json.dumps(MEGABYTES).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, port))
            client.sendall(head("/generate", len(body)) + body)
            while not service.ended:
                await asyncio.sleep(0.01)
        await service.rig.books_are_empty()
