"""Between an agent that speaks Responses and Kedge: as held_answers.py, with that protocol's fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.clients.held_answers import TIMEOUT_S, Call, Exchange, Words

_PASSED_ON = ("content-type", "accept", "user-agent", "authorization")


def usage(exchange: Exchange) -> dict[str, Any]:
    """That of a streamed reply's end."""
    events = [json.loads(line[6:]) for line in exchange.reply.splitlines() if line.startswith("data: ")]
    told: dict[str, Any] = events[-1]["response"]["usage"]
    return told


class HeldResponses:
    """An application that passes requests on to Kedge at `url`. The answer behind n others is held to `answers[n]`."""

    def __init__(self, url: str, answers: Sequence[Call | Words]) -> None:
        self._answers = answers
        self._schemas = {each.tool: each.schema for each in answers if isinstance(each, Call)}
        self._kedge = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)
        self.exchanges: list[Exchange] = []
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "POST"])

    async def _pass_on(self, request: Request) -> StreamingResponse:
        content, body = await request.body(), None
        if request.method == "POST" and request.url.path == "/v1/responses":
            body = self._held(json.loads(content))
            content = json.dumps(body).encode()
        headers = {name: value for name, value in request.headers.items() if name in _PASSED_ON}
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        passed_on = self._kedge.build_request(request.method, target, content=content, headers=headers)
        reply = await self._kedge.send(passed_on, stream=True)
        return StreamingResponse(
            self._heard(body, reply), reply.status_code, media_type=reply.headers.get("content-type")
        )

    def _held(self, body: dict[str, Any]) -> dict[str, Any]:
        given = sum(
            item.get("type") == "function_call" or item.get("role") == "assistant" for item in body["input"]
        )
        tools = [
            tool | {"parameters": self._schemas[tool["name"]]} if tool.get("name") in self._schemas else tool
            for tool in body["tools"]
        ]
        match self._answers[given]:
            case Call(name):
                held: dict[str, Any] = {"tool_choice": {"type": "function", "name": name}}
            case Words(text):
                wanted = {"type": "json_schema", "name": "words", "schema": {"const": text}}
                held = {"tool_choice": "none", "text": {**(body.get("text") or {}), "format": wanted}}
        return body | {"tools": tools} | held

    async def _heard(self, body: dict[str, Any] | None, reply: httpx.Response) -> AsyncIterator[bytes]:
        """A client that has the last event may leave before the stream ends."""
        pieces: list[bytes] = []
        try:
            async for piece in reply.aiter_raw():
                pieces.append(piece)
                yield piece
        finally:
            if body is not None:
                self.exchanges.append(Exchange(body, reply.status_code, b"".join(pieces).decode()))
            await reply.aclose()
