"""The fields that bodies of chat completions, text completions and Responses have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    base_sampling,
)
from serving.front.api.priorities import LOWER_FIRST, Priority
from serving.front.api.strict_json import StrictBody
from serving.wire.turns import ModelInfo

MAX_METADATA = 64
MAX_KWARGS_CHARS = 65_536


def _not_too_long(kwargs: dict[str, Any]) -> dict[str, Any]:
    length = len(json.dumps(kwargs, ensure_ascii=False))
    if length > MAX_KWARGS_CHARS:
        raise ValueError(f"{length} characters; at most {MAX_KWARGS_CHARS} are allowed.")
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_not_too_long)]
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]


class PromptCacheOptions(StrictBody):
    """Hints without effect: a session's KV is kept as long as there is room for it."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class SharedFields(StrictBody):
    """None means the default."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    priority: Priority | None = Field(None, description=LOWER_FIRST)
    prompt_cache_key: str | None = Field(
        None, description="Requests with the same key go to one replica as long as its load allows it."
    )

    # About the caller, or hints: without effect on the answer.
    metadata: Metadata | None = None
    user: str | None = Field(
        None, description="Like prompt_cache_key, if the setting sessions.unnamed.affinity.user allows it."
    )
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """The engine's parameters; the seed and the token limit are passed separately."""
        sampling = base_sampling(
            model,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
        return replace(sampling, ignore_eos=bool(self.ignore_eos))


def check_stream_options(options: StrictBody | None, body: SharedFields) -> None:
    if options is not None and not body.stream:
        raise refusal("stream_options: only allowed when stream is true.", "stream_options")
