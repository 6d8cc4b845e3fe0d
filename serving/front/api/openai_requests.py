"""What chat and text completions have in common on the way in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    AdditivePenalty,
    Count,
    LogitBias,
    MinP,
    NumChoices,
    RepetitionPenalty,
    Seed,
    StopStrings,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    check_token_ids,
    checked_bias,
    engine_temperature,
    engine_top_k,
)
from serving.front.api.openai_structured import HeldAnswer, ResponseFormat, StructuredOutputs
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import HistoryMode, ModelInfo, SessionTurn

MAX_METADATA = 64


def field_names(prompt_field: str, held: HeldAnswer | None) -> dict[str, str]:
    """What these protocols call the fields that the engine and the replica name in their errors."""
    return {
        "prompt": prompt_field,
        "input_ids": prompt_field,
        "max_new_tokens": "max_tokens",
        "session_id": "x-session-id",
        "idempotency_key": "idempotency-key",
        "tool_calls": "tools",
        **({} if held is None else {held.constraint.kind: held.field}),
    }


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Taken, and without effect.")


class OpenAiBody(StrictBody):
    """Sampling as OpenAI and vLLM name it. None means the default; vLLM's own fields follow OpenAI's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    frequency_penalty: AdditivePenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    # About the caller, or hints: without effect on the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    store: bool | None = None

    allowed_token_ids: NotSupported = None
    bad_words: NotSupported = None
    cache_salt: NotSupported = None
    guided_choice: NotSupported = None
    guided_decoding_backend: NotSupported = None
    guided_grammar: NotSupported = None
    guided_json: NotSupported = None
    guided_regex: NotSupported = None
    kv_transfer_params: NotSupported = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logits_processors: NotSupported = None
    min_tokens: NotSupported = None
    priority: NotSupported = None
    prompt_logprobs: NotSupported = None
    request_id: NotSupported = None
    return_tokens_as_token_ids: NotSupported = None
    spaces_between_special_tokens: Literal[True, None] = None
    truncate_prompt_tokens: NotSupported = None
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
        """The engine's parameters; the seed and the token limit travel beside them."""
        stop_ids = self.stop_token_ids or []
        check_token_ids(stop_ids, model, "stop_token_ids")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else engine_temperature(self.temperature),
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=engine_top_k(self.top_k or 0),
            min_p=self.min_p or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=checked_bias(self.logit_bias, model, "logit_bias"),
            stop_token_ids=frozenset(stop_ids),
            ignore_eos=bool(self.ignore_eos),
        )


def check_stream_options(body: OpenAiBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options: only allowed when stream is true.", "stream_options")


def session_turn(
    session_id: str | None,
    key: str | None,
    retries: int | None,
    num_calls: int,
    param: str,
    *,
    mode: HistoryMode = "append",
    expected_turn: int | None = None,
) -> SessionTurn | None:
    """The session named by the headers. Outside one a retry repeats nothing, so the key has no use; nor has the count
    of retries beside a key."""
    if session_id is None:
        return None
    if num_calls > 1:
        raise refusal(f"{param}: a session takes one generation at a time.", param)
    return SessionTurn(
        session_id,
        idempotency_key=key,
        retries=retries if key is None else None,
        expected_turn=expected_turn,
        mode=mode,
    )
