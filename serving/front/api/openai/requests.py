"""What the requests of chat and text completions have in common. Responses share some of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    AdditivePenalty,
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Count,
    CountOrZero,
    LogitBias,
    MinP,
    Name,
    NumChoices,
    RepetitionPenalty,
    Seed,
    StopStrings,
    StopTokenIds,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    base_sampling,
    check_token_ids,
    checked_bias,
    most_tokens,
)
from serving.front.api.hidden_sessions import check_not_hidden
from serving.front.api.openai.structured import GuidedFields, HeldAnswer, ResponseFormat, StructuredOutputs
from serving.front.api.priorities import LOWER_FIRST, Priority
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import HistoryMode, ModelInfo, SessionTurn

MAX_METADATA = 64

Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]


class PromptCacheOptions(StrictBody):
    """Hints without effect: a session's KV is kept as long as there is room for it."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class SharedFields(StrictBody):
    """Fields that Responses have, too. None means the default."""

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
        return base_sampling(
            model,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


def field_names(
    prompt_field: str, held: HeldAnswer | None, tokens_field: str = "max_tokens"
) -> dict[str, str]:
    """The names that these protocols have for the fields that the engine and the replica name in their errors.
    `tokens_field` is the field that says how long the answer may be."""
    return {
        "prompt": prompt_field,
        "input_ids": prompt_field,
        "max_new_tokens": tokens_field,
        "session_id": "x-session-id",
        "idempotency_key": "idempotency-key",
        "tool_calls": "tools",
        "strict_calls": "tools",
        **({} if held is None else {held.constraint.kind: held.field}),
    }


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
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: CountOrZero | None = Field(
        None, description="The answer does not end by itself before this many tokens."
    )
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="Only this many last tokens of the prompt are used. -1: as many as there is room for.",
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Cached prefixes are shared only among requests with the same salt."
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
            ignore_eos=bool(self.ignore_eos),
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
    mode: HistoryMode | None = None,
    unsaid_mode: HistoryMode = "append",
    expected_turn: int | None = None,
) -> SessionTurn | None:
    """The turn in the session that the headers name; None without a session. Then a key has no use, because a retry
    repeats nothing. If there is a key, the count of retries has no use. `unsaid_mode`: the mode if the header does not
    say one. Raises ServiceError."""
    if session_id is None:
        for name, said in (("x-session-mode", mode), ("x-session-turn", expected_turn)):
            if said is not None:
                raise refusal(f"{name}: says nothing without x-session-id.", name)
        return None
    check_not_hidden(session_id, "x-session-id")
    if num_calls > 1:
        raise refusal(f"{param}: a session takes one generation at a time.", param)
    return SessionTurn(
        session_id,
        idempotency_key=key,
        retries=retries if key is None else None,
        expected_turn=expected_turn,
        mode=mode or unsaid_mode,
    )


def check_no_session(session_id: str | None, mode: HistoryMode | None, expected_turn: int | None) -> None:
    """For counts of a prompt's tokens, which know no sessions. Raises ServiceError."""
    headers = (("x-session-id", session_id), ("x-session-mode", mode), ("x-session-turn", expected_turn))
    for name, said in headers:
        if said is not None:
            raise refusal(
                f"{name}: only what is sent is counted, without a session's history. Send all of it, without {name}.",
                name,
            )
