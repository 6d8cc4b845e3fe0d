"""One chat with a server that keeps sessions: only the new messages of a turn are sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from serving.cli.client.server import (
    MODE_HEADER,
    SESSION_HEADER,
    ServerError,
    not_text,
    refused,
    request_json,
    unreachable,
)
from serving.cli.client.stream import Chunk, EventSplitter, TokenCounts, parse_event


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """How long a turn took, seen by the client. Times are seconds since the request was sent."""

    first_token_s: float
    last_token_s: float
    usage: TokenCounts

    @property
    def tokens_per_s(self) -> float | None:
        """Output rate after the first token; None if no time passed after it."""
        span_s = self.last_token_s - self.first_token_s
        return (self.usage.completion_tokens - 1) / span_s if span_s > 0 else None


class TurnStream:
    """A turn in flight: iterate for text, then read `timing`. Leaving the `with` early aborts the turn."""

    def __init__(self, client: httpx.Client, request: httpx.Request) -> None:
        self._client = client
        self._request = request
        self._started_s = time.perf_counter()
        self._token_times_s: list[float] = []
        self._usage: TokenCounts | None = None
        self.finish_reason: str | None = None

    def __enter__(self) -> TurnStream:
        try:
            self._response = self._client.send(self._request, stream=True)
            if self._response.is_error:
                self._response.read()
        except httpx.HTTPError as error:
            raise unreachable(str(self._client.base_url), error) from error
        if self._response.is_error:
            raise refused(self._response)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks with text or a thought."""
        splitter = EventSplitter()
        try:
            for data in self._response.iter_bytes():
                now_s = time.perf_counter() - self._started_s
                for payload in splitter.push(data):
                    chunk = parse_event(payload)
                    if chunk is not None:
                        self._note(chunk, now_s)
                        if chunk.text or chunk.thought:
                            yield chunk
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"the stream broke off: {error or type(error).__name__}") from error
        if self.finish_reason is None:
            raise ServerError("the stream ended before the turn did")

    def _note(self, chunk: Chunk, now_s: float) -> None:
        if chunk.error:
            raise ServerError(chunk.error)
        if chunk.carries_token:
            self._token_times_s.append(now_s)
        self._usage = chunk.usage or self._usage
        self.finish_reason = chunk.finish_reason or self.finish_reason

    @property
    def timing(self) -> TurnTiming | None:
        """Figures of a finished turn; None if it made no token or the server reports no usage."""
        if not self._token_times_s or self._usage is None:
            return None
        return TurnTiming(self._token_times_s[0], self._token_times_s[-1], self._usage)


class ServedSession:
    """A session on the server. The system prompt travels with the first turn that commits."""

    def __init__(
        self,
        client: httpx.Client,
        session_id: str,
        model: str,
        system: str | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self.session_id = session_id
        self._client = client
        self._model = model
        self._system = system
        self._sampling = sampling or {}
        self._started = False

    def turn(self, text: str) -> TurnStream:
        """Sends the user's words. Call `commit` after the stream has ended without an error. Raises ServerError for
        words that cannot be sent."""
        messages = [{"role": "user", "content": text}]
        if self._system and not self._started:
            messages.insert(0, {"role": "system", "content": self._system})
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        headers = {SESSION_HEADER: self.session_id, MODE_HEADER: "append"}
        try:
            request = self._client.build_request("POST", "/v1/chat/completions", json=body, headers=headers)
        except UnicodeError as error:
            raise not_text(error) from error
        return TurnStream(self._client, request)

    def commit(self) -> None:
        """Notes that the server has kept a turn, so that the system prompt is not sent again."""
        self._started = True

    def close(self) -> None:
        """Frees the session on the server."""
        request_json(self._client, "POST", "/close_session", {"session_id": self.session_id})
