"""What a stream ends with is written at once: the last event of its turn, what follows it, and the end of the reply."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from tests.unit.serving.front.streamed_requests import STREAMED, streamed

ENDS: dict[str, tuple[bytes, bytes]] = {
    "/generate": (b'"finish_reason":{"type":"length"', b"data: [DONE]\n\n"),
    "/v1/completions": (b'"finish_reason":"length"', b"data: [DONE]\n\n"),
    "/v1/chat/completions": (b'"finish_reason":"length"', b"data: [DONE]\n\n"),
    "/v1/messages": (b"event: message_delta", b'data: {"type":"message_stop"}\n\n'),
    "/v1/responses": (b"event: response.incomplete", b"\n\n"),
}


@pytest.mark.parametrize("path", STREAMED)
async def test_the_last_event_and_the_end_are_one_write(app: FastAPI, path: str) -> None:
    sent: list[dict[str, Any]] = []
    reply = await streamed(app, path, sent.append)
    written = [message for message in sent if message["type"] == "http.response.body"]
    assert b"".join(message["body"] for message in written) == reply.content
    assert [message["more_body"] for message in written] == [True] * (len(written) - 1) + [False]
    finish, end = ENDS[path]
    assert finish in written[-1]["body"]
    assert written[-1]["body"].endswith(end)
