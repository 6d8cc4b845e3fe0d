"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from serving.front.api.fields import (
    MAX_CALLS,
    RAW_LOGPROBS,
    CountOrZero,
    NonEmptyText,
    TokenIds,
    TopLogprobs,
)
from serving.front.api.openai.replies import StopDetails, Usage
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.reply_json import Reply
from serving.front.api.strict_json import NotSupported
from serving.wire.turns import TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<token lists>" if isinstance(first, list) else "<token ids>"


CompletionPrompt = Annotated[
    Annotated[NonEmptyText, Tag("<text>")]
    | Annotated[list[NonEmptyText], Field(max_length=MAX_CALLS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_CALLS), Tag("<token lists>")],
    Discriminator(_prompt_kind),
]


class CompletionBody(OpenAiBody):
    prompt: CompletionPrompt
    max_tokens: CountOrZero | None = Field(
        None, description="16 if left out. 0 only scores the prompt, with echo and logprobs."
    )
    logprobs: TopLogprobs | None = Field(None, description=RAW_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, description="It must equal n.")
    add_special_tokens: bool | None = Field(
        None, description="Unless this is false, the tokenizer adds special tokens to a text."
    )
    suffix: NotSupported = None

    def asked_tokens(self) -> tuple[int | None, str]:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens, "max_tokens"

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        """The prompts, one for each sequence to continue."""
        special = self.add_special_tokens is not False
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt, special)]
        many = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return [TextPrompt(p, special) if isinstance(p, str) else TokenPrompt(tuple(p)) for p in many]


class CompletionLogprobs(Reply, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(StopDetails, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionReply(Reply, kw_only=True):
    """A whole reply, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
