"""What OpenAI's `response_format`, and vLLM's `structured_outputs`, hold an answer to."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from serving.front.api.answers.held import ANY_OBJECT, HeldAnswer
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    Grammar,
    JsonSchema,
    NonEmptyText,
    Regex,
    SchemaOrText,
    check_grammar_len,
    schema_constraint,
    schema_of,
)
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import OutputConstraint

MAX_CHOICES = 4096
Choices = Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchemaFormat(StrictBody):
    """`strict` has no effect: a schema is enforced, or the request is refused."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    json_schema: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GuidedFields(StrictBody):
    """vLLM's earlier names for the same, and SGLang's `regex` and `ebnf`."""

    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: str | None = Field(
        None, description="This field has no effect: there is only one backend."
    )
    guided_whitespace_pattern: NotSupported = None
    regex: Regex | None = None
    ebnf: Grammar | None = None


class StructuredOutputs(StrictBody):
    """Exactly one of `json`, `json_object` (true), `regex`, `choice` and `grammar` says what the answer must be."""

    json_schema: SchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    disable_additional_properties: NotSupported = None
    disable_any_whitespace: NotSupported = None
    disable_fallback: bool | None = Field(None, description="This field has no effect: there is no fallback.")
    grammar: Grammar | None = None
    structural_tag: NotSupported = None
    whitespace_pattern: NotSupported = None


def held_answer(
    wanted: ResponseFormat | None, others: StructuredOutputs | None, guided: GuidedFields
) -> HeldAnswer | None:
    """What the answer is held to; None if to nothing. Raises ServiceError, which names the field."""
    by_format = None if wanted is None else _by_format(wanted)
    by_others = None if others is None else _by_others(others)
    return _only_one(list(filter(None, (by_format, by_others, _by_guided(guided)))))


def _by_format(wanted: ResponseFormat) -> HeldAnswer | None:
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        param = "response_format.json_schema"
        raise refusal(f"{param}: goes with the type json_schema, and only with it.", param)
    if wanted.type == "json_object":
        return _by_schema(ANY_OBJECT, "response_format")
    if wanted.json_schema is not None:
        return _by_schema(wanted.json_schema.json_schema, "response_format.json_schema.schema")
    return None


def _by_others(wanted: StructuredOutputs) -> HeldAnswer | None:
    held = _held("structured_outputs.", wanted.json_schema, wanted.regex, wanted.choice, wanted.grammar)
    if wanted.json_object:
        held.append(_by_schema(ANY_OBJECT, "structured_outputs.json_object"))
    if not held:
        raise refusal(
            "structured_outputs: says nothing to hold the answer to; send one of json, json_object (true), regex, "
            "choice and grammar in it, or leave it out.",
            "structured_outputs",
        )
    return _only_one(held)


def _by_guided(wanted: GuidedFields) -> HeldAnswer | None:
    held = _held(
        "guided_", wanted.guided_json, wanted.guided_regex, wanted.guided_choice, wanted.guided_grammar
    )
    if wanted.regex is not None:
        held.append(_by_regex(wanted.regex, "regex"))
    if wanted.ebnf is not None:
        held.append(HeldAnswer(OutputConstraint("grammar", wanted.ebnf), "ebnf"))
    return _only_one(held)


def _held(
    prefix: str,
    schema: JsonSchema | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[HeldAnswer]:
    """A HeldAnswer for each of these that is given."""
    held: list[HeldAnswer] = []
    if schema is not None:
        field = f"{prefix}json"
        held.append(_by_schema(schema_of(schema, field), field))
    if regex is not None:
        held.append(_by_regex(regex, f"{prefix}regex"))
    if choice is not None:
        held.append(_by_regex("|".join(map(re.escape, choice)), f"{prefix}choice"))
    if grammar is not None:
        held.append(HeldAnswer(OutputConstraint("grammar", grammar), f"{prefix}grammar"))
    return held


def _only_one(held: list[HeldAnswer]) -> HeldAnswer | None:
    """Some clients say the same in several fields, of which each server knows one."""
    for other in held[1:]:
        if other.constraint != held[0].constraint:
            raise refusal(
                f"{other.field}: {held[0].field} already says what the answer must be.", other.field
            )
    return held[0] if held else None


def _by_schema(schema: JsonSchema, field: str) -> HeldAnswer:
    return HeldAnswer(schema_constraint(schema, field), field)


def _by_regex(regex: str, field: str) -> HeldAnswer:
    check_grammar_len(regex, field)
    return HeldAnswer(OutputConstraint("regex", regex), field)
