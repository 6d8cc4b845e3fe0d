"""A proxy between an agent and Kedge. It forces each answer to be what a model that can call tools might say.

A model with random weights makes no sensible tool call. So the proxy adds constraints to each request before it passes
the request on: a `tool_choice` whose schema allows one value for each argument, or a response format that allows one
value. Everything else is as the agent sent it. Every request has the same tools, because tools are part of the prompt.
What differs between the APIs is in held_chats.py, held_messages.py and held_responses.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

TIMEOUT_S = 200.0
_OF_ONE_HOP = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")


@dataclass(frozen=True, slots=True)
class Call:
    """An answer that calls one tool."""

    tool: str
    arguments: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {"const": value} for name, value in self.arguments.items()},
            "required": list(self.arguments),
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class Words:
    """An answer that calls no tool: this text, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that Kedge reported for a request."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class HeldApi(Protocol):
    """One of Kedge's APIs."""

    @property
    def path(self) -> str:
        """The path of requests for an answer."""
        ...

    def held(
        self, body: dict[str, Any], answer: Call | Words, schemas: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The body with constraints that force this answer. `schemas` has the argument schema of each tool, by name."""
        ...

    def usage(self, told: Sequence[dict[str, Any]]) -> Usage:
        """The usage in a reply, given as its one object or as the events of its stream."""
        ...


@dataclass(slots=True)
class Exchange:
    """One request for an answer, and what has arrived of Kedge's reply."""

    body: dict[str, Any]
    status: int
    pieces: list[bytes] = field(default_factory=list)

    def told(self) -> list[dict[str, Any]]:
        """The reply's object, or the events of its stream."""
        text = b"".join(self.pieces).decode()
        if text.startswith("{"):
            return [json.loads(text)]
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]


class HeldAnswers:
    """An application that passes requests on to Kedge at `url`. It forces the n-th answer to be `answers[n]`."""

    def __init__(self, url: str, api: HeldApi, answers: Sequence[Call | Words]) -> None:
        self._api = api
        self._answers = answers
        self._schemas = {each.tool: each.schema for each in answers if isinstance(each, Call)}
        self._kedge = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)
        self.exchanges: list[Exchange] = []
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "HEAD", "POST"])

    @property
    def statuses(self) -> list[int]:
        return [each.status for each in self.exchanges]

    def usages(self) -> list[Usage]:
        return [self._api.usage(each.told()) for each in self.exchanges]

    def cached_shares(self) -> list[float]:
        """For each request but the first: what share of the previous request's tokens, with its answer, came from the
        cache."""
        return [now.cached_tokens / before.total_tokens for before, now in pairwise(self.usages())]

    async def _pass_on(self, request: Request) -> StreamingResponse:
        content, body = await request.body(), None
        if request.method == "POST" and request.url.path == self._api.path:
            answer = self._answers[len(self.exchanges)]
            body = self._api.held(json.loads(content), answer, self._schemas)
            content = json.dumps(body).encode()
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_HOP}
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        passed_on = self._kedge.build_request(request.method, target, content=content, headers=headers)
        reply = await self._kedge.send(passed_on, stream=True)
        pieces: list[bytes] = []
        if body is not None:
            self.exchanges.append(Exchange(body, reply.status_code, pieces))
        headers = {name: value for name, value in reply.headers.items() if name not in _OF_ONE_HOP}
        return StreamingResponse(_heard(reply, pieces), reply.status_code, headers)


async def _heard(reply: httpx.Response, pieces: list[bytes]) -> AsyncIterator[bytes]:
    """Passes the reply on and keeps its pieces. A client that has the last event may leave before the stream ends."""
    try:
        async for piece in reply.aiter_raw():
            pieces.append(piece)
            yield piece
    finally:
        await reply.aclose()
