"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from serving.front.api.fields import MAX_CALLS, CountOrZero, NonEmptyText, TokenIds, TopLogprobs
from serving.front.api.openai_replies import StopDetails, Usage
from serving.front.api.openai_requests import OpenAiBody
from serving.front.api.reply_json import Reply
from serving.front.api.strict_json import NotSupported
from serving.wire.turns import TextPrompt, TokenPrompt


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
    max_tokens: CountOrZero | None = Field(None, description="16 unless given; 0 to score an echoed prompt.")
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = Field(None, description="Only as large as n.")
    add_special_tokens: Literal[True, None] = None
    suffix: NotSupported = None

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        """One for each sequence to continue."""
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt)]
        many = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return [TextPrompt(p) if isinstance(p, str) else TokenPrompt(tuple(p)) for p in many]


class CompletionLogprobs(Reply, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(StopDetails, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None


class CompletionReply(Reply, kw_only=True):
    """A whole reply, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
