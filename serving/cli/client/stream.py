"""Reads a streamed OpenAI completion: bytes → event payloads → chunks.

It also understands other servers (vLLM, SGLang, llama.cpp): `kedge bench` measures them with the same code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of one request as the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    @property
    def new_prompt_tokens(self) -> int:
        return self.prompt_tokens - (self.cached_tokens or 0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed event. `carries_token` is False for events such as the opening role and the closing usage. `thought`
    is text of the model's reasoning, which is no part of its answer."""

    text: str = ""
    thought: str = ""
    token_ids: tuple[int, ...] = ()
    carries_token: bool = False
    finish_reason: str | None = None
    usage: TokenCounts | None = None
    error: str | None = None


@dataclass(slots=True)
class EventSplitter:
    """Cuts a byte stream into the payloads of its `data:` lines; keeps an unfinished rest."""

    _rest: bytes = field(default=b"")

    def push(self, data: bytes) -> list[str]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip().decode() for line in lines if line.startswith(b"data:")]


def parse_event(payload: str) -> Chunk | None:
    """A chunk, or None for the end marker `[DONE]`. Raises ValueError if the payload is not a JSON object."""
    if payload == "[DONE]":
        return None
    body = json.loads(payload)
    if not isinstance(body, dict):
        raise ValueError(f"not an object: {payload[:80]}")
    if body.get("error"):
        return Chunk(error=error_message(body))
    usage = parse_usage(body.get("usage"))
    choices = body.get("choices") or []
    if not choices:
        return Chunk(usage=usage)
    return _parse_choice(choices[0], usage)


def _parse_choice(choice: dict[str, Any], usage: TokenCounts | None) -> Chunk:
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content", delta.get("reasoning"))  # vLLM's newer name
    pieces = (choice.get("text"), delta.get("content"))
    text = "".join(piece for piece in pieces if piece)
    finish_reason = choice.get("finish_reason")
    # Some servers send a token whose text is held back (half of a character) as empty text: it is a token.
    # The opening chunk of a chat has empty text too, but names the role.
    told = any(piece is not None for piece in (*pieces, thought))
    held_back = "role" not in delta and finish_reason is None and told
    token_ids = tuple(choice.get("token_ids") or ())
    return Chunk(
        text=text,
        thought=thought or "",
        token_ids=token_ids,
        carries_token=bool(text) or bool(thought) or bool(token_ids) or held_back,
        finish_reason=finish_reason,
        usage=usage,
    )


def parse_usage(usage: dict[str, Any] | None) -> TokenCounts | None:
    """Token counts; `cached_tokens` is None if the server does not report it."""
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return TokenCounts(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=details.get("cached_tokens"),
    )


def error_message(body: object) -> str:
    """The readable message of an error body, in any of the usual shapes."""
    if isinstance(body, dict):
        inner = body.get("error", body.get("detail", body.get("message", body)))
        if isinstance(inner, dict):
            inner = inner.get("message", inner)
        return str(inner)
    return str(body)
