"""Fields that OpenAI's calls have in common: OpenAI's, and vLLM's beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.api import SamplingParams
from serving.front.api.fields import MinP, RepetitionPenalty, Seed, Temperature, TopK, TopP, base_sampling
from serving.front.api.priorities import LOWER_FIRST, Priority
from serving.front.api.strict_json import StrictBody
from serving.wire.turns import ModelInfo

MAX_METADATA = 64

Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]


class SharedFields(StrictBody):
    """None means the default."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    priority: Priority | None = Field(None, description=LOWER_FIRST)
    prompt_cache_key: str | None = Field(
        None, description="Requests of one key go to one replica while its load allows it."
    )

    # About the caller, or hints: without effect on the answer.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """The engine's parameters; the seed and the token limit travel beside them."""
        return base_sampling(
            model,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
