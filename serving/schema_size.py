"""JSON schemas that would take the grammar's compiler minutes, and the machine's memory, before it has an answer.

llguidance bounds what most schemas may cost. It does not bound patterns that one value must all match, whose product it
takes (each doubles it), nor `multipleOf`, which becomes an automaton with a state for each remainder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MOST_PATTERNS = 8
MOST_REMAINDERS = 100_000
EXACT_INTEGERS = 2**53

_PATTERNS = ("pattern", "format")
_WITHIN = ("anyOf", "oneOf", "items", "prefixItems", "additionalItems", "additionalProperties")
_BY_NAME = ("properties", "patternProperties")


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What may be asked of one value at once, at most."""

    patterns: int = 0
    remainders: int = 1

    def __and__(self, other: _Meeting) -> _Meeting:
        return _Meeting(self.patterns + other.patterns, self.remainders * other.remainders)

    def __or__(self, other: _Meeting) -> _Meeting:
        return _Meeting(max(self.patterns, other.patterns), max(self.remainders, other.remainders))


def check_size(source: str) -> None:
    """Raises ValueError where the schema may ask too much of one value."""
    try:
        schema = json.loads(source, parse_int=_exact)
        most = _Walk(schema).of(schema)
    except json.JSONDecodeError:
        return  # the compiler says what is wrong
    except RecursionError:
        raise ValueError("its recursion is too deep") from None
    if most.patterns > MOST_PATTERNS:
        raise ValueError(
            f"up to {most.patterns} patterns and formats meet in one value; at most {MOST_PATTERNS} may"
        )
    if most.remainders > MOST_REMAINDERS:
        raise ValueError(
            f"multipleOf is too large for one value; at most {MOST_REMAINDERS}, not counting the decimal point"
        )


class _Walk:
    """Over one document. Each reference is followed once."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._refs: dict[str, _Meeting] = {}

    def of(self, schema: Any) -> _Meeting:
        """An upper bound for values of the schema, or of one of several, and for all within them."""
        if isinstance(schema, list):
            return self._any(schema)
        if not isinstance(schema, dict):
            return _Meeting()
        most = _Meeting(sum(name in schema for name in _PATTERNS), _remainders(schema.get("multipleOf")))
        if isinstance(ref := schema.get("$ref"), str):
            most &= self._ref(ref)
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                most &= self.of(part)
        for name in _WITHIN:
            most &= self.of(schema.get(name))
        for name in _BY_NAME:
            if isinstance(by_name := schema.get(name), dict):
                most &= self._any(by_name.values())
        return most

    def _any(self, schemas: Iterable[Any]) -> _Meeting:
        most = _Meeting()
        for schema in schemas:
            most |= self.of(schema)
        return most

    def _ref(self, ref: str) -> _Meeting:
        """One that leads back to itself adds nothing: values lie within each other."""
        if ref != "#" and not ref.startswith("#/"):
            raise ValueError(f"the reference {ref[:40]!r} is no pointer within the schema (#/…)")
        if ref not in self._refs:
            self._refs[ref] = _Meeting()
            self._refs[ref] = self.of(self._target(ref))
        return self._refs[ref]

    def _target(self, pointer: str) -> Any:
        """None where nothing is: the compiler says so."""
        target = self._document
        for step in pointer.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict):
                target = target.get(name)
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                return None
        return target


def _remainders(divisor: Any) -> int:
    """The divisor's digits as an integer, so that 0.25 has 25. All that are far too large are one."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 1
    if not math.isfinite(divisor):
        return MOST_REMAINDERS + 1
    _, digits, exponent = Decimal(str(divisor)).normalize().as_tuple()
    scaled = Decimal((0, digits, max(0, int(exponent))))
    return max(1, int(min(scaled, Decimal(MOST_REMAINDERS + 1))))


def _exact(digits: str) -> int:
    """llguidance reads integers as floats, and would hold the output to another number."""
    value = int(digits)
    if abs(value) > EXACT_INTEGERS:
        raise ValueError(f"{digits[:40]} is beyond 2**53")
    return value
