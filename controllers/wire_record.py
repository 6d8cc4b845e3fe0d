"""Records that processes of two versions exchange, since a rolling update runs both side by side.

A frozen dataclass with slots is pickled as the list of its fields' values, without names. So fields are only ever
added, at the end and with a default. A version that does not know a field ignores it, and a version that misses one
uses its default.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

WIRE_VERSION = 3
"""The version of all records and of the controller's methods. Each release that changes these increases it."""

FIRST_VERSION = 1
"""The version of a controller that does not tell its own. It is replaced, as all earlier ones are."""

ABSENT = "absent"
"""Key of a field's metadata: the field's value in records of a version without the field, if not the default."""

T = TypeVar("T")


def wire_record(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass with slots readable by the version before this one and the version after.

    Reading raises TypeError if a field without a default is missing.
    """
    known = fields(cls)  # type: ignore[arg-type]
    names = tuple(field.name for field in known)

    def get_state(record: Any) -> list[Any]:
        return [getattr(record, name) for name in names]

    def set_state(record: Any, state: list[Any]) -> None:
        """Sets the fields. Ignores values that a newer version has added at the end."""
        for name, value in zip(names, state, strict=False):
            object.__setattr__(record, name, value)
        for field in known[len(state) :]:
            object.__setattr__(record, field.name, _absent(cls, field))

    # mypy allows no assignment to a method
    setattr(cls, "__getstate__", get_state)  # noqa: B010
    setattr(cls, "__setstate__", set_state)  # noqa: B010
    return cls


def _absent(kind: type, field: Field[Any]) -> Any:
    if ABSENT in field.metadata:
        return field.metadata[ABSENT]
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"a {kind.__name__} of another version has no {field.name}")
