"""A digest that tells apart different requests with the same idempotency key.

The session log keeps it, and a retry may come after an update. So records count by their fields' names, without those
at their defaults: a field that a later version adds changes no digest of a request without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec

from serving.wire.turns import TurnCall

_ASKED = frozenset(
    {
        "adapter",
        "bad_words",
        "constraint",
        "logprobs",
        "max_new_tokens",
        "prompt",
        "sampling",
        "seed",
        "shown_tokens",
        "skip_special_tokens",
        "stop",
        "strict_calls",
        "trim_stop",
    }
)
"""The fields of a call that shape its answer."""


def request_digest(call: TurnCall) -> str:
    """The digest of all that shapes the call's answer."""
    asked = {name: value for name, value in _told_fields(call).items() if name in _ASKED}
    return hashlib.sha256(json.dumps(asked, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A value that JSON does not know, as one that it knows."""
    match value:
        case bytes():
            return value.hex()
        case frozenset():
            return sorted(value)
        case Mapping():
            return dict(value)
        case _:
            return _told_fields(value)


def _told_fields(record: Any) -> dict[str, Any]:
    """The fields of a record that are not at their defaults, in the order of their names."""
    kind: Any = type(record)
    told = {}
    for name, default in _defaults_of(kind).items():
        value = getattr(record, name)
        if value != default:
            told[name] = value
    return told


@cache
def _defaults_of(kind: Any) -> Mapping[str, Any]:
    """The defaults of a kind of record by the names of its fields, in the order of these. A field without a default has
    a value that nothing equals. To find them out takes longer than a digest."""
    known: Iterable[Any] = fields(kind) if is_dataclass(kind) else msgspec.structs.fields(kind)
    return MappingProxyType(
        {
            field.name: field.default_factory() if callable(field.default_factory) else field.default
            for field in sorted(known, key=lambda each: each.name)
        }
    )
