"""Notes of turns in any session log: their bytes, and which of them still count.

A turn's note counts as long as all of its input, except the opening of the answer, is part of the history. If a turn
continues from within an answer, the note of that answer's turn stays and is cut there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, takewhile

from controllers.records import Checkpoint, LedgerEntry, SessionRecord, TurnNote, TurnRecord


def has_note(record: TurnRecord) -> bool:
    """Whether there is anything to keep besides the turn's tokens."""
    return bool(record.note) or record.checkpoint is not None or record.whole


def encode_note(note: TurnNote) -> bytes:
    """A line of JSON, followed by the note's bytes. The log keeps the `turn_index` elsewhere."""
    place = note.checkpoint
    at = None if place is None else [place.num_messages, place.digest.hex(), place.length, place.template]
    return (
        json.dumps([note.start_len, note.asked_len, note.end_len, at, note.whole, note.opening_len]).encode()
        + b"\n"
        + note.note
    )


def decode_note(turn_index: int, stored: bytes) -> TurnNote:
    head, _, note = stored.partition(b"\n")
    start_len, asked_len, end_len, at, whole, opening_len = json.loads(head)
    place = None if at is None else Checkpoint(at[0], bytes.fromhex(at[1]), at[2], at[3])
    return TurnNote(turn_index, start_len, asked_len, end_len, place, whole, note, opening_len)


def note_of(record: TurnRecord) -> TurnNote:
    return TurnNote(
        record.turn_index,
        record.start_len,
        record.asked_len,
        record.end_len,
        record.checkpoint,
        record.whole,
        record.note,
        record.opening_len,
    )


def inherited(notes: Iterable[TurnNote], parent: LedgerEntry | SessionRecord, length: int) -> list[TurnNote]:
    """The notes that a fork with the parent's first `length` tokens inherits. The fork's own turns begin at 0, so these
    get negative numbers."""
    return [replace(note, turn_index=note.turn_index - parent.turns) for note in counting(notes, length)]


def counting(notes: Iterable[TurnNote], length: int) -> list[TurnNote]:
    """The notes that count in a history of `length` tokens, ordered by turn. Each is cut where the next one begins."""
    kept: list[TurnNote] = []
    for note in sorted(notes, key=lambda note: note.turn_index):
        _cut(kept, note.start_len)
        kept.append(note)
    _cut(kept, length)
    return kept


def num_within(sizes: Iterable[int], room: int) -> int:
    """How many notes of these sizes, in bytes, fit into `room` bytes, in their order; at least one."""
    return max(1, sum(1 for _ in takewhile(lambda total: total <= room, accumulate(sizes))))


def _cut(notes: list[TurnNote], length: int) -> None:
    while notes and notes[-1].said_len > length:
        notes.pop()
    if notes:
        notes[-1] = notes[-1].cut(length)
