"""What to send and how often. Validated once; never changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LoadError(Exception):
    """The load cannot be run as requested. The message is for the user."""


class Mode(StrEnum):
    """How history reaches the server: it keeps the history (session), or every turn sends all of it (resend)."""

    SESSION = "session"
    RESEND = "resend"


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class PromptKind(StrEnum):
    """Text prompts are about `input_tokens` long; token ids are exactly that long."""

    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """One run. Token counts are per turn; `concurrency` sessions run at a time, each with one turn after another.
    Without `keep_alive` each turn has a connection of its own: some servers promise to keep one open, but close it."""

    url: str
    model: str
    mode: Mode
    endpoint: Endpoint
    prompt: PromptKind
    sessions: int
    turns: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    warmup: int
    seed: int
    vocab_size: int
    ignore_eos: bool
    timeout_s: float
    keep_alive: bool = True

    def __post_init__(self) -> None:
        if self.endpoint is Endpoint.CHAT and self.prompt is PromptKind.IDS:
            raise LoadError("--prompt ids needs --endpoint completions: a chat is sent as text")
        if self.prompt is PromptKind.IDS and self.vocab_size <= FIRST_TOKEN_ID:
            raise LoadError(f"--vocab-size must be above {FIRST_TOKEN_ID}")


FIRST_TOKEN_ID = 32
"""Random token ids start here: the first few of a vocabulary are often special."""
