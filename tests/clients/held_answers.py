"""Between an agent and Kedge: holds each answer to what a model that can call tools might say there.

Random weights make no sensible call. So each request is passed on with the API's own fields beside it: `tool_choice`
with a schema that has one value for each argument, or `output_config.format` with one value. All else is the agent's.
The tools are the same in every request, since they are part of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """An answer that calls none: this text, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request for a message, and Kedge's reply."""

    body: dict[str, Any]
    status: int
    reply: str

    @property
    def usage(self) -> dict[str, int]:
        """Of a streamed reply: that of its end."""
        events = [json.loads(line[6:]) for line in self.reply.splitlines() if line.startswith("data: ")]
        (last,) = [event["usage"] for event in events if event["type"] == "message_delta"]
        return dict(last)

    @property
    def prompt_tokens(self) -> int:
        return self.usage["input_tokens"] + self.usage["cache_read_input_tokens"]


class HeldAnswers:
    """An application that passes requests on to Kedge at `url`. The answer behind n others is held to `answers[n]`."""

    def __init__(self, url: str, answers: Sequence[Call | Words]) -> None:
        self._answers = answers
        self._schemas = {each.tool: each.schema for each in answers if isinstance(each, Call)}
        self._kedge = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)
        self.exchanges: list[Exchange] = []
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "HEAD", "POST"])

    async def _pass_on(self, request: Request) -> StreamingResponse:
        content, body = await request.body(), None
        if request.method == "POST" and request.url.path == "/v1/messages":
            body = self._held(json.loads(content))
            content = json.dumps(body).encode()
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_HOP}
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        passed_on = self._kedge.build_request(request.method, target, content=content, headers=headers)
        reply = await self._kedge.send(passed_on, stream=True)
        headers = {name: value for name, value in reply.headers.items() if name not in _OF_ONE_HOP}
        return StreamingResponse(self._heard(body, reply), reply.status_code, headers)

    def _held(self, body: dict[str, Any]) -> dict[str, Any]:
        given = sum(message["role"] == "assistant" for message in body["messages"])
        tools = [
            tool | {"input_schema": self._schemas[tool["name"]]} if tool["name"] in self._schemas else tool
            for tool in body["tools"]
        ]
        match self._answers[given]:
            case Call(name):
                held: dict[str, Any] = {"tool_choice": {"type": "tool", "name": name}}
            case Words(text):
                wanted = {"type": "json_schema", "schema": {"const": text}}
                config = {**body.get("output_config", {}), "format": wanted}
                held = {"tool_choice": {"type": "none"}, "output_config": config}
        return body | {"tools": tools} | held

    async def _heard(self, body: dict[str, Any] | None, reply: httpx.Response) -> AsyncIterator[bytes]:
        pieces = []
        async for piece in reply.aiter_raw():
            pieces.append(piece)
            yield piece
        await reply.aclose()
        if body is not None:
            text = b"".join(pieces).decode()
            self.exchanges.append(Exchange(body, reply.status_code, text))
