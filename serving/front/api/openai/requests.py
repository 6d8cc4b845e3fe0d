"""What the requests of chat and text completions have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from engine.api import SamplingParams
from serving.front.api.fields import (
    AdditivePenalty,
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Count,
    CountOrZero,
    LogitBias,
    Name,
    NumChoices,
    StopStrings,
    StopTokenIds,
    TopLogprobs,
    check_token_ids,
    checked_bias,
    most_tokens,
)
from serving.front.api.openai.structured import GuidedFields, ResponseFormat, StructuredOutputs
from serving.front.api.shared_fields import SharedFields
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import ModelInfo


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage, every chunk has the usage."
    )
    include_obfuscation: bool | None = Field(None, description="This field has no effect.")


class OpenAiBody(GuidedFields, SharedFields):
    """Sampling as OpenAI and vLLM name it. vLLM's own fields follow OpenAI's."""

    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    max_tokens: Count | None = None
    stop: StopStrings | None = None
    frequency_penalty: AdditivePenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None

    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="The reply has the ids of the answer's tokens.")
    structured_outputs: StructuredOutputs | None = None
    min_tokens: CountOrZero | None = Field(
        None,
        description="The answer does not end before this many tokens: neither the end token nor stop_token_ids come "
        "earlier, and a stop string that ends earlier does not count. It may not be more than max_tokens.",
    )
    allowed_token_ids: AllowedTokenIds | None = Field(
        None,
        description="No other tokens come. The end token comes only if it is among them. Where no token may come, the "
        "answer ends.",
    )
    bad_words: BadWords | None = Field(
        None,
        description="Texts that the answer may not have, in two tokenizations: at the beginning of a text, and after a "
        "blank. Other spellings, as with capitals or after a quotation mark, are other words. All together have "
        "at most 16,384 characters.",
    )
    prompt_logprobs: TopLogprobs | None = Field(
        None,
        description="For each token of the prompt: its log-probability and those of this many most likely tokens, by "
        "token id. The first token has null, and a token that is none of the most likely has no rank. Refused in "
        "streams.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name each token as `token_id:123`."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="Only this many last tokens of the prompt are used. -1: as many as there is room for.",
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Cached prefixes are shared only among requests of the same tenant with this salt."
    )
    request_id: Name | None = Field(None, description="The reply's id ends with this text.")
    store: bool | None = Field(None, description="This field has no effect.")

    kv_transfer_params: NotSupported = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logits_processors: NotSupported = None
    spaces_between_special_tokens: Literal[True, None] = None
    use_beam_search: NotSupported = None
    vllm_xargs: NotSupported = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_everywhere(self) -> bool:
        return self.wants_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def sampling(self, model: ModelInfo) -> SamplingParams:
        stop_ids = self.stop_token_ids or []
        check_token_ids(stop_ids, model, "stop_token_ids")
        check_token_ids(self.allowed_token_ids or [], model, "allowed_token_ids")
        return replace(
            super().sampling(model),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=checked_bias(self.logit_bias, model, "logit_bias"),
            stop_token_ids=frozenset(stop_ids),
            min_new_tokens=self.min_tokens or 0,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        )

    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens of an answer that the client asks for, and the field that says so."""
        return self.max_tokens, "max_tokens"

    def most_tokens(self, model: ModelInfo) -> tuple[int | None, str]:
        """The same, within the model's default limit."""
        asked, field = self.asked_tokens()
        return most_tokens(model, asked), field
