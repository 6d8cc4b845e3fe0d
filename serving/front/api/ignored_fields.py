"""Unknown fields of a body, if the application lets them pass, collected to be named to the client.

The client is told, because an answer looks the same whether a field took effect or was ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pydantic.fields import FieldInfo

IGNORED_FIELDS = "x-kedge-ignored-fields"
MOST_NAMED = 16
MOST_NAME_CHARS = 120
_AS_THEY_ARE = "[]."
"""Characters that are not quoted, beside letters, digits and `_.-~`. A name may be any text, but a header's value may
not."""


class IgnoredFields:
    """The unknown fields of one body. True if there are any."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}
        """By the `id()` of the object that has them. The body keeps that object alive."""
        self._count = 0
        self._paths: list[str] = []

    def __bool__(self) -> bool:
        return self._count > 0

    def without_unknown(self, values: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> dict[str, Any]:
        """An object of the body without its unknown fields, which are noted."""
        names = {field.alias or name for name, field in known.items()}
        unknown = [name for name in values if name not in names]
        if unknown:
            self._count += len(unknown)
            self._names[id(values)] = unknown
        return {name: value for name, value in values.items() if name in names}

    def find_in(self, body: Any) -> None:
        """Finds where in the body the first of them are. Walks over its objects and lists."""
        places: list[tuple[str, Any]] = [("", body)]
        while places and len(self._paths) < min(self._count, MOST_NAMED):
            path, value = places.pop()
            if isinstance(value, dict):
                dot = f"{path}." if path else ""
                self._paths += [f"{dot}{name}" for name in self._names.get(id(value), ())]
                places += [(f"{dot}{name}", inner) for name, inner in reversed(value.items())]
            elif isinstance(value, list):
                places += [(f"{path}[{index}]", inner) for index, inner in reversed([*enumerate(value)])]

    @property
    def header(self) -> str:
        """The header's value, such as `seed2, messages[0].mood`, and how many more there are."""
        shown = [quote(path, safe=_AS_THEY_ARE)[:MOST_NAME_CHARS] for path in self._paths[:MOST_NAMED]]
        more = self._count - len(shown)
        return ", ".join([*shown, f"{more} more"] if more else shown)
