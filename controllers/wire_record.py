"""Records that travel between processes of two versions, as a rolling update has them side by side.

A frozen dataclass with slots is pickled as the list of its fields' values, without names. So fields are only ever
added, at the end and with a default: a version that does not know them leaves them out, and one that misses them fills
them in.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

WIRE_VERSION = 3
"""Of all records, and of the controller's methods. It goes up with each release that changes them."""

FIRST_VERSION = 1
"""Of those who do not tell theirs."""

ABSENT = "absent"
"""In a field's metadata: what it is in a record of a version that did not have it, if that is not its default."""

T = TypeVar("T")


def wire_record(cls: type[T]) -> type[T]:
    """Lets a frozen dataclass with slots be read by the version before this one and the one after.

    Reading raises TypeError if a field without a default is missing.
    """
    known = fields(cls)  # type: ignore[arg-type]
    names = tuple(field.name for field in known)

    def get_state(record: Any) -> list[Any]:
        return [getattr(record, name) for name in names]

    def set_state(record: Any, state: list[Any]) -> None:
        """What a newer version has added at the end is left out."""
        for name, value in zip(names, state, strict=False):
            object.__setattr__(record, name, value)
        for field in known[len(state) :]:
            object.__setattr__(record, field.name, _absent(cls, field))

    # mypy lets no method be replaced by name
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
