"""Fields that several protocols share: their types, their ranges, and what they mean to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError, from_json

from engine.api import (
    MAX_ADDITIVE_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from serving.front.api.errors import UNSUPPORTED, refusal
from serving.front.api.strict_json import StrictBody
from serving.settings.strict_settings import MAX_NAME_CHARS, NAME_PATTERN
from serving.wire.turns import ModelInfo, OutputConstraint

MAX_CALLS = 256
"""Generations (prompts × n) that one HTTP request may start."""
MAX_BIASES = 16_384
MAX_GRAMMAR_CHARS = 65_536
"""Longest JSON schema, regular expression or grammar: as much as can be compiled in a second or two."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 16_384
"""Of all words together. A replica's event loop waits while they are made into tokens: so many take some 40 ms of a
core."""
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Of one message."""
SHOWN_CHARS = 60
"""How much of a word that is not known an error repeats."""
MAX_INT = 2**31 - 1
_SEED_BITS = 2**63 - 1
_GREEDY_BELOW = 1e-5

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS, pattern=NAME_PATTERN)]
"""An id given by a client."""


def stays_in_a_path(name: str) -> str:
    """For ids that clients give: a path leaves these two out, so it would name something else."""
    if name in (".", ".."):
        raise ValueError(f"{name!r} is no id: paths leave it out.")
    return name


SessionName = Annotated[Name, AfterValidator(stays_in_a_path)]
"""The id that a client gives a session that may be new."""

Count = Annotated[int, Field(ge=1, le=MAX_INT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_INT)]
NumChoices = Annotated[int, Field(ge=1, le=128)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
RAW_LOGPROBS = (
    "Log-probabilities are those of the model itself, before temperature, penalties, biases and constraints."
)
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MAX_INT)]
MinP = Annotated[float, Field(ge=0, le=1)]
AdditivePenalty = Annotated[float, Field(ge=-MAX_ADDITIVE_PENALTY, le=MAX_ADDITIVE_PENALTY)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
        Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)],
    ],
    Field(max_length=MAX_BIASES),
]
JsonSchema = dict[str, Any]
Regex = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Grammar = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


def _schema_kind(value: Any) -> str:
    return "<schema>" if isinstance(value, dict) else "<text>"


SchemaOrText = Annotated[
    Annotated[JsonSchema, Tag("<schema>")] | Annotated[str, Tag("<text>")], Discriminator(_schema_kind)
]
AllowedTokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


def refused_kind(kind: str) -> str:
    """Refuses the `type` of something that is not served, by name. For pydantic's validators."""
    raise PydanticCustomError(UNSUPPORTED, "{kind} is not supported here", {"kind": repr(kind[:SHOWN_CHARS])})


class OtherKind(StrictBody):
    """Something that is known but not served, by its `type`. It is refused, and the error names it."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, AfterValidator(refused_kind)]


class DirectCaller(StrictBody):
    """Of a call: the model made it itself, not a program that it wrote."""

    type: Literal["direct"]


CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=256)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"\S")]


def _not_too_long(words: list[str]) -> list[str]:
    length = sum(map(len, words))
    if length > MAX_BAD_WORDS_CHARS:
        raise ValueError(f"{length} characters; at most {MAX_BAD_WORDS_CHARS} are allowed.")
    return words


BadWords = Annotated[
    list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True), AfterValidator(_not_too_long)
]
StopTokenIds = Annotated[list[int], Field(max_length=64)]

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def one_or_many(value: Any) -> str:
    """The tag of a field that takes one value or a list of values."""
    return "<many>" if isinstance(value, list) else "<one>"


def one_or_many_lists(value: Any) -> str:
    """The same, if a single value is a list itself."""
    return "<many>" if isinstance(value, list) and value and isinstance(value[0], list) else "<one>"


StopStrings = Annotated[
    Annotated[StopString, Tag("<one>")] | Annotated[list[StopString], Field(max_length=16), Tag("<many>")],
    Discriminator(one_or_many),
]

NonEmptyText = Annotated[str, StringConstraints(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


def new_id(prefix: str) -> str:
    """An id nobody has used."""
    return f"{prefix}{uuid4().hex}"


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def engine_temperature(temperature: float) -> float:
    """The engine's temperature. Very small ones become 0, greedy: dividing by them would overflow."""
    return temperature if temperature >= _GREEDY_BELOW else 0.0


def engine_top_k(top_k: int) -> int:
    """The engine's top-k. Both -1 and 0 turn it off."""
    return max(top_k, 0)


def base_sampling(
    model: ModelInfo,
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> SamplingParams:
    """Sampling parameters from the request's values; where these are None, from the model's defaults."""
    own = model.sampling
    return SamplingParams(
        temperature=engine_temperature(own.temperature if temperature is None else temperature),
        top_p=own.top_p if top_p is None else top_p,
        top_k=engine_top_k(own.top_k if top_k is None else top_k),
        min_p=own.min_p if min_p is None else min_p,
        repetition_penalty=own.repetition_penalty if repetition_penalty is None else repetition_penalty,
    )


def most_tokens(model: ModelInfo, asked: int | None) -> int | None:
    """The most tokens of an answer: the smaller of what the request asks for and the model's default limit. None: as
    many as there is room for."""
    return min((limit for limit in (asked, model.sampling.max_new_tokens) if limit is not None), default=None)


def nth_seed(seed: int | None, index: int) -> int | None:
    """The seed of the index-th choice, in the engine's range. None stays None: the engine picks one."""
    return None if seed is None else (seed + index) & _SEED_BITS


def checked_bias(bias: Mapping[str, float] | None, model: ModelInfo, param: str) -> Mapping[int, float]:
    """Logit bias by token id."""
    if not bias:
        return MappingProxyType({})
    checked = {int(key): value for key, value in bias.items()}
    check_token_ids(checked, model, param)
    return checked


def schema_constraint(schema: JsonSchema, param: str) -> OutputConstraint:
    """Holds the output to a JSON schema. Properties come in the schema's order."""
    source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    check_grammar_len(source, param)
    return OutputConstraint("json_schema", source)


def schema_of(schema: JsonSchema | str, param: str) -> JsonSchema:
    """A schema that is given as an object or as text. Raises ServiceError."""
    if isinstance(schema, str):
        check_grammar_len(schema, param)  # before it is parsed: nobody has counted its values
        try:
            schema = from_json(schema, allow_inf_nan=False)
        except ValueError as error:
            raise refusal(f"{param}: not valid JSON: {error}", param) from error
    if not isinstance(schema, dict):
        raise refusal(f"{param}: a schema is a JSON object.", param)
    return schema


def check_min_tokens(least: int, most: int | None, param: str, most_param: str) -> None:
    """`most` None: as much as the context allows."""
    if most is not None and least > most:
        raise refusal(f"{param}: {least} are more than {most_param}, {most}.", param)


def check_grammar_len(source: str, param: str) -> None:
    if len(source) > MAX_GRAMMAR_CHARS:
        raise refusal(f"{param}: {len(source)} characters; at most {MAX_GRAMMAR_CHARS} are allowed.", param)


def check_token_ids(token_ids: Iterable[int], model: ModelInfo, param: str) -> None:
    """Refuses ids that the model does not have."""
    token_ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < model.vocab_size)
    raise refusal(f"{param}: token id {wrong} is outside the vocabulary of {model.vocab_size} tokens.", param)


def check_num_calls(count: int, param: str) -> None:
    if count > MAX_CALLS:
        raise refusal(f"{param}: {count} generations in one request; at most {MAX_CALLS} are allowed.", param)
