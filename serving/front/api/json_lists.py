"""Long lists as JSON text, some entries at a time: all log-probabilities of a large answer take seconds, in which the
event loop would serve nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

T = TypeVar("T")

ENTRIES_AT_ONCE = 64
"""Log-probabilities with twenty others each take some milliseconds."""


async def list_items(entries: Sequence[T], shape: Callable[[T], Any]) -> str:
    """JSON of the shaped entries, with commas between them and no brackets. Other tasks run meanwhile."""
    texts: list[str] = []
    for start in range(0, len(entries), ENTRIES_AT_ONCE):
        await asyncio.sleep(0)  # first, too: an answer may have many short lists
        some = [shape(entry) for entry in entries[start : start + ENTRIES_AT_ONCE]]
        texts.append(to_json(some, inf_nan_mode="null").decode()[1:-1])
    return joined_items(texts)


def joined_items(texts: Iterable[str]) -> str:
    """The items of several such texts, in order. Those of an empty list are none."""
    return ",".join(filter(None, texts))


def filled(text: str, name: str, items: str) -> str:
    """JSON with these items in the empty list that it has under that name.

    There must be one. No string of the JSON looks like it: quotes in strings are escaped.
    """
    before, empty, after = text.partition(f'"{name}":[]')
    assert empty, name
    return f'{before}"{name}":[{items}]{after}'
