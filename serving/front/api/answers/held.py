"""What an answer is held to, and what clients call the fields that errors name."""

from __future__ import annotations

from dataclasses import dataclass

from serving.wire.turns import OutputConstraint

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """What an answer is held to, and the field that says so."""

    constraint: OutputConstraint
    field: str


def field_names(
    prompt_field: str, held: HeldAnswer | None, tokens_field: str = "max_tokens"
) -> dict[str, str]:
    """What clients call the fields that the engine and the replica name in their errors.
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
