"""Numbers and flags of a configuration, checked.

Each function raises UnsupportedModel that names the key and what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.models.errors import UnsupportedModel


def positive_integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Null stands for the default, if there is one."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def whole_number(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """0 or more; null stands for the default."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise UnsupportedModel(f"config.json: {key} must be an integer from 0 on, not {value!r}")
    return value


def positive_number(values: Mapping[str, Any], key: str, default: float, least: float = 0.0) -> float:
    """A number that is at least so large; null stands for the default."""
    value = values.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not (0 < value < math.inf and value >= least):
        wanted = f"at least {least:g}" if least else "a positive number"
        raise UnsupportedModel(f"config.json: {key} must be {wanted}, not {value!r}")
    return float(value)


def truth(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Null is refused, too."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"config.json: {key} must be true or false, not {value!r}")
    return value
