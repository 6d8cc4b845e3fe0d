"""Reading a hash of a session in Redis that has a field for each of some turns, named by the turn's index. Nothing here
reads more fields than it has to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controllers.session_log.redis_log import FIELDS_AT_ONCE, LogReader
from controllers.session_log.turn_notes import num_within

FIRST_READ = 2
GROWTH = 4
"""`fields_back` reads so many fields at first, and then so many times more each time."""


def fields_back(log: LogReader, key: str, num_turns: int) -> Iterator[tuple[int, bytes]]:
    """The turns before `num_turns` and their fields, the last turn first. Most callers stop at the first one, so only
    others cost the names of all fields."""
    at_once = FIRST_READ
    yield from fields_of(log, key, range(num_turns - 1, num_turns - 1 - at_once, -1))
    turns = [turn for turn in reversed(_turns(log, key)) if turn < num_turns - at_once]
    while turns:
        at_once = min(at_once * GROWTH, FIELDS_AT_ONCE)
        yield from fields_of(log, key, turns[:at_once])
        turns = turns[at_once:]


def fields_after(log: LogReader, key: str, turn_index: int | None, room: int) -> list[tuple[int, bytes]]:
    """The fields of turns after `turn_index` (None: from the first) that have up to `room` bytes, but at least one."""
    turns = [turn for turn in _turns(log, key) if turn_index is None or turn > turn_index][:FIELDS_AT_ONCE]
    if not turns:
        return []
    sizes = log.read(*(("HSTRLEN", key, turn) for turn in turns))
    return fields_of(log, key, turns[: num_within(sizes, room)])


def fields_of(log: LogReader, key: str, turns: Sequence[int]) -> list[tuple[int, bytes]]:
    """The fields of those of the turns that have one."""
    if not turns:
        return []
    (fields,) = log.read(("HMGET", key, *turns))
    return [(turn, field) for turn, field in zip(turns, fields, strict=True) if field is not None]


def _turns(log: LogReader, key: str) -> list[int]:
    """The turns that have a field, in their order."""
    (names,) = log.read(("HKEYS", key))
    return sorted(int(name) for name in names if name.removeprefix(b"-").isdigit())
