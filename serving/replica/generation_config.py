"""A model's own sampling defaults: `generation_config.json` beside its weights, read as vLLM reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.api import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from serving.wire.turns import SamplingDefaults

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_IN_RANGE: Mapping[str, Callable[[float], bool]] = MappingProxyType(
    {
        "temperature": lambda value: 0 <= value <= MAX_TEMPERATURE,
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: value >= -1 and isinstance(value, int),
        "min_p": lambda value: 0 <= value <= 1,
        "repetition_penalty": lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        "max_new_tokens": lambda value: value >= 1 and isinstance(value, int),
    }
)


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """The defaults of the model in this directory. `do_sample` is ignored, as in vLLM. A value that is not a number or
    is out of its range is ignored with a warning. So is a file that is not a JSON object."""
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return SamplingDefaults()
    try:
        said: Any = json.loads(path.read_bytes())
    except ValueError:
        said = None
    if not isinstance(said, dict):
        logger.warning("%s is no JSON object: the usual defaults are taken", path)
        return SamplingDefaults()
    found: dict[str, Any] = {}
    for name, in_range in _IN_RANGE.items():
        value = said.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not in_range(value):
            logger.warning("%s: %s cannot be %r", path, name, value)
            continue
        found[name] = value
    return SamplingDefaults(**found)
