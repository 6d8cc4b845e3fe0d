"""What an answer is held to, and what clients call the fields that errors name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serving.front.api.field_names import FieldNames
from serving.wire.turns import OutputConstraint

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """What an answer is held to, and the field that says so."""

    constraint: OutputConstraint
    field: str


def field_names(
    prompt_field: str,
    held: HeldAnswer | None,
    tokens_field: str = "max_tokens",
    *,
    session_field: str = "x-session-id",
    of_message: Callable[[int], str] | None = None,
) -> FieldNames:
    """What clients call the fields that the engine and the replica name in their errors. `tokens_field` says how long
    the answer may be, `session_field` in which session the turn is. `of_message`: see FieldNames."""
    by_field: dict[str, str] = {
        "prompt": prompt_field,
        "messages": prompt_field,
        "input_ids": prompt_field,
        "max_new_tokens": tokens_field,
        "session_id": session_field,
        "idempotency_key": "idempotency-key",
        "tool_calls": "tools",
        "strict_calls": "tools",
        **({} if held is None else {held.constraint.kind: held.field}),
    }
    return FieldNames(by_field, of_message)
