"""Clients that have the same conversation but send different things: the whole history, or only what is new."""

from __future__ import annotations

import uuid
from enum import StrEnum

import aiohttp

from serving.cli.client.server import MODE_HEADER, SESSION_HEADER
from serving.cli.load.sample import TurnSample
from serving.cli.load.turn import TurnRequest, run_turn


class Way(StrEnum):
    """What a client sends with each turn."""

    UNNAMED = "whole history, no name"
    NAMED = "whole history, x-session-id"
    SESSION = "new messages, x-session-id"


class Speaker:
    """One conversation over /v1/chat/completions, streamed and greedy."""

    def __init__(self, client: aiohttp.ClientSession, url: str, way: Way, number: int) -> None:
        self._client = client
        self._url = url
        self._way = way
        self._number = number
        self._turn = 0
        self._messages: list[dict[str, str]] = []
        self._headers = {} if way is Way.UNNAMED else {SESSION_HEADER: f"bench-{uuid.uuid4().hex[:12]}"}
        if way is Way.SESSION:
            self._headers[MODE_HEADER] = "append"

    async def say(self, words: str, max_tokens: int, **fields: object) -> TurnSample:
        """Sends the next turn. Raises RuntimeError if it fails."""
        self._turn += 1
        if self._way is Way.SESSION:
            self._messages.clear()
        self._messages.append({"role": "user", "content": words})
        body: dict[str, object] = {
            "messages": self._messages,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        path = f"{self._url}/v1/chat/completions"
        sample = await run_turn(
            self._client, TurnRequest(self._number, self._turn, path, body, self._headers)
        )
        if sample.error is not None:
            raise RuntimeError(f"{self._way}, turn {self._turn}: {sample.error}")
        self._messages.append({"role": "assistant", "content": sample.text})
        return sample

    async def close(self) -> None:
        """Ends a named session."""
        if SESSION_HEADER in self._headers:
            body = {"session_id": self._headers[SESSION_HEADER]}
            async with self._client.post(f"{self._url}/close_session", json=body):
                pass


def open_client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0),
        headers={"accept-encoding": "identity"},
    )
