"""Bodies of the session protocol, named as SGLang names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from engine.api import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    MAX_CALLS,
    RAW_LOGPROBS,
    AdditivePenalty,
    CountOrZero,
    Grammar,
    LogitBias,
    MinP,
    Name,
    NonEmptyText,
    NumChoices,
    Regex,
    RepetitionPenalty,
    SchemaOrText,
    Seed,
    SessionName,
    StopStrings,
    StopTokenIds,
    Temperature,
    TokenIds,
    TopK,
    TopLogprobs,
    TopP,
    check_min_tokens,
    check_token_ids,
    checked_bias,
    engine_temperature,
    engine_top_k,
    one_or_many,
    one_or_many_lists,
    schema_constraint,
    schema_of,
)
from serving.front.api.priorities import HIGHER_FIRST, Priority
from serving.front.api.reply_json import Reply
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import ModelInfo, OutputConstraint


class SamplingBody(StrictBody):
    """If `max_new_tokens` is null, the answer may be as long as the context allows."""

    max_new_tokens: CountOrZero | None = DEFAULT_MAX_NEW_TOKENS
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    sampling_seed: Seed | None = None
    n: NumChoices = 1
    json_schema: SchemaOrText | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None
    min_new_tokens: CountOrZero = 0

    custom_params: NotSupported = None
    spaces_between_special_tokens: Literal[True, None] = None
    stop_regex: NotSupported = None
    structural_tag: NotSupported = None

    @property
    def seed_given(self) -> int | None:
        return self.seed if self.sampling_seed is None else self.sampling_seed

    def sampling(self, model: ModelInfo, name: str) -> SamplingParams:
        """The engine's parameters; the seed and the token limit are passed separately. `name`: this object's, in
        errors. Raises ServiceError."""
        stop_ids = self.stop_token_ids or []
        check_token_ids(stop_ids, model, f"{name}.stop_token_ids")
        least = f"{name}.min_new_tokens"
        check_min_tokens(self.min_new_tokens, self.max_new_tokens, least, "max_new_tokens")
        return SamplingParams(
            temperature=engine_temperature(self.temperature),
            top_p=self.top_p,
            top_k=engine_top_k(self.top_k),
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=checked_bias(self.logit_bias, model, f"{name}.logit_bias"),
            stop_token_ids=frozenset(stop_ids),
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_new_tokens,
        )

    def constraint(self, name: str) -> OutputConstraint | None:
        """What the output is held to. `name`: this object's, in errors. Raises ServiceError."""
        given = {"json_schema": self.json_schema, "regex": self.regex, "ebnf": self.ebnf}
        names = [kind for kind, value in given.items() if value is not None]
        if len(names) > 1:
            param = f"{name}.{names[1]}"
            raise refusal(f"{param}: give either {names[0]} or {names[1]}.", param)
        if self.regex is not None:
            return OutputConstraint("regex", self.regex)
        if self.ebnf is not None:
            return OutputConstraint("grammar", self.ebnf)
        if self.json_schema is None:
            return None
        param = f"{name}.json_schema"
        return schema_constraint(schema_of(self.json_schema, param), param)


class SessionParams(StrictBody):
    """The session, and where in it the request continues.

    A session that was opened with `streaming` is a line of turns. The request is its next turn: `rid` has no effect,
    and the other fields are refused.

    Any other session is a tree of requests. The new request continues the request that `rid` names; without `rid` it
    begins anew. If `offset` is positive, it continues after that many tokens; if negative, it leaves out that many of
    the last tokens. With `drop_previous_output` it leaves out that request's output. With `replace`, all requests
    that continued that request before are closed once this one has its answer (without `rid`, all requests of the
    session).
    """

    id: Name
    rid: Annotated[str, Field(max_length=256)] | None = None
    offset: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


Texts = Annotated[
    Annotated[NonEmptyText, Tag("<one>")]
    | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_CALLS, fail_fast=True), Tag("<many>")],
    Discriminator(one_or_many),
]
InputIds = Annotated[
    Annotated[TokenIds, Tag("<one>")] | Annotated[list[TokenIds], Field(max_length=MAX_CALLS), Tag("<many>")],
    Discriminator(one_or_many_lists),
]
RequestIds = Annotated[
    Annotated[Name, Tag("<one>")]
    | Annotated[list[Name], Field(max_length=MAX_CALLS, fail_fast=True), Tag("<many>")],
    Discriminator(one_or_many),
]


SamplingBodies = Annotated[
    Annotated[SamplingBody, Tag("<one>")]
    | Annotated[list[SamplingBody], Field(min_length=1, max_length=MAX_CALLS, fail_fast=True), Tag("<many>")],
    Discriminator(one_or_many),
]
LoraPaths = Annotated[
    Annotated[Name, Tag("<one>")]
    | Annotated[list[Name | None], Field(max_length=MAX_CALLS, fail_fast=True), Tag("<many>")],
    Discriminator(one_or_many),
]


class GenerateBody(StrictBody):
    """One prompt or a batch of prompts, as `text` or `input_ids`."""

    text: Texts | None = None
    input_ids: Annotated[InputIds | None, Field(validate_default=True)] = None
    sampling_params: SamplingBodies | None = Field(
        None, description="One object, or a list with one for each prompt. `n` is the same in all of them."
    )
    stream: bool | None = None
    rid: RequestIds | None = None
    return_logprob: bool | None = Field(None, description=RAW_LOGPROBS)
    logprob_start_len: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="With return_logprob, input tokens from this position on are scored. Positions count from the "
        "beginning of the session's history; scored tokens of the history are computed again. With null or -1, no "
        "input token is scored.",
    )
    top_logprobs_num: TopLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    session_params: SessionParams | None = None
    priority: Priority | None = Field(None, description=HIGHER_FIRST)
    lora_path: LoraPaths | None = Field(
        None, description="The name of an adapter of the model, or a list with one (or null) for each prompt."
    )
    log_metrics: bool | None = Field(None, description="This field has no effect.")

    audio_data: NotSupported = None
    background: NotSupported = None
    custom_logit_processor: NotSupported = None
    image_data: NotSupported = None
    input_embeds: NotSupported = None
    modalities: NotSupported = None
    return_hidden_states: NotSupported = None
    return_routed_experts: NotSupported = None
    token_ids_logprob: NotSupported = None
    video_data: NotSupported = None

    @field_validator("input_ids")
    @classmethod
    def _one_input(cls, input_ids: Any, info: ValidationInfo) -> Any:
        """If the text itself is wrong, that error is reported first."""
        if (info.data.get("text") is None) == (input_ids is None):
            raise ValueError("Give either text or input_ids.")
        return input_ids

    @property
    def prompt_field(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def batched(self) -> bool:
        """True if the reply is a list: several prompts, or one in a list."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and bool(given) and isinstance(given[0], str | list)

    @property
    def choices(self) -> int:
        """Generations for each prompt."""
        given = self.sampling_params or SamplingBody()
        return given[0].n if isinstance(given, list) else given.n


class OpenSessionBody(StrictBody):
    """`capacity_of_str_len` (in characters) has no effect: a session may grow as far as memory allows. The session ends
    after `timeout` idle seconds. With `streaming`, it is a line of turns instead of a tree of requests."""

    capacity_of_str_len: CountOrZero
    session_id: SessionName | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None


class CloseSessionBody(StrictBody):
    session_id: Name


class AbortBody(StrictBody):
    rid: str | None = None
    abort_all: bool = False


LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(Reply, kw_only=True):
    """`e2e_latency` in seconds; token counts as the protocol defines them.

    The `spec_` fields are set if there were drafts; the rate is accepted drafts divided by all drafts.
    """

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: dict[str, Any] | None
    e2e_latency: float
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_draft_token_num: int | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET
    replayed: bool | UnsetType = UNSET


class GenerateReply(Reply, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
