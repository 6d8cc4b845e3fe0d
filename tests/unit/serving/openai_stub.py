"""A small OpenAI-compatible server over real HTTP, for tests of the client side. Its tokens are words."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

SESSIONS_IN_PAGE = 2


@dataclass
class Stub:
    """The stub's behaviour, which the test sets, and what the stub has seen. Times are seconds."""

    keeps_sessions: bool = True
    reports_usage: bool = True
    returns_token_ids: bool = True
    token_delay_s: float = 0.001
    tokens_per_chunk: int = 1
    fails_with: int | None = None
    breaks_off: bool = False
    breaks_off_at: int | None = None
    """Only the stream of the request of this number breaks off."""
    default_tokens: int = 4
    thinks_tokens: int = 0
    """So many tokens of a chat's answer are thoughts."""
    word: str = "w"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    session_ids: list[str | None] = field(default_factory=list)
    history: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    aborted: int = 0
    ledger: list[dict[str, Any]] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "stub-model", "object": "model"}]}

        @app.get("/v1/kedge/sessions")
        async def sessions(after: int = 0) -> dict[str, Any]:
            page = self.ledger[after : after + SESSIONS_IN_PAGE]
            more = after + len(page) < len(self.ledger)
            return {"sessions": page, "next": str(after + len(page)) if more else None}

        @app.post("/v1/kedge/sessions/{session_id:path}/fork")
        async def fork(session_id: str, request: Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            if session_id not in self.history:
                return JSONResponse({"error": {"message": "no such session"}}, 404)
            new_id = body.get("new_session_id", "fork-1")
            self.history[new_id] = body.get("length", self.history[session_id])
            return {"session_id": new_id, "tokens": self.history[new_id], "cached_tokens": 3}

        @app.get("/v1/kedge/audit")
        async def audit() -> dict[str, Any]:
            return self.audit

        @app.post("/close_session")
        async def close(request: Request) -> JSONResponse:
            session_id = (await request.json())["session_id"]
            self.history.pop(session_id, None)
            self.closed.append(session_id)
            return JSONResponse(None)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            return await self._answer(request, chat=True)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            return await self._answer(request, chat=False)

        return app

    async def _answer(self, request: Request, chat: bool) -> Any:
        body = await request.json()
        self.bodies.append(body)
        breaks_off = self.breaks_off or len(self.bodies) == self.breaks_off_at
        session_id = request.headers.get("x-session-id") if self.keeps_sessions else None
        self.session_ids.append(request.headers.get("x-session-id"))
        if self.fails_with is not None:
            error = {"message": "stub says no", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, self.fails_with)
        cached = self.history.get(session_id, 0) if session_id else 0
        prompt_tokens = cached + _count_tokens(body)
        return StreamingResponse(
            self._events(body, chat, session_id, prompt_tokens, cached, breaks_off),
            media_type="text/event-stream",
        )

    async def _events(
        self,
        body: dict[str, Any],
        chat: bool,
        session_id: str | None,
        prompt_tokens: int,
        cached: int,
        breaks_off: bool,
    ) -> AsyncIterator[str]:
        output = body.get("max_tokens", self.default_tokens)
        done = 0
        try:
            if chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            while done < output:
                await asyncio.sleep(self.token_delay_s)
                if breaks_off and done:
                    return
                count = min(self.tokens_per_chunk, output - done)
                words = "".join(f" {self.word}{number}" for number in range(done, done + count))
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                field = "reasoning_content" if done < self.thinks_tokens else "content"
                choice |= {"delta": {field: words}} if chat else {"text": words}
                if body.get("return_token_ids") and self.returns_token_ids:
                    choice["token_ids"] = list(range(50 + done, 50 + done + count))
                done += count
                yield _event({"choices": [choice]})
            final: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            yield _event({"choices": [final | ({"delta": {}} if chat else {"text": ""})]})
            if session_id:
                self.history[session_id] = prompt_tokens + done
            if self.reports_usage:
                yield _event({"choices": [], "usage": _usage(prompt_tokens, done, cached)})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise


def _usage(prompt_tokens: int, completion_tokens: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _count_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


@contextmanager
def running(stub: Stub) -> Iterator[Stub]:
    """Serves the stub on a free port of the loopback, with its own thread and event loop."""
    config = uvicorn.Config(stub.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    waited = threading.Event()
    while not server.started:
        waited.wait(0.005)
    stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join(timeout=10)
