"""Which of a session's answers are kept for replays. Pure.

A client that names an idempotency key may repeat its request much later. A turn without a key gets one from its front
end, which repeats the call at once if it gets no answer, for example when the replica is lost. So the two kinds are
counted separately: turns without a client's key never displace answers of turns with one. The last turn's answer is
always kept.

If a turn is no longer whole in the history, because a later one went back, its answer is deleted and only its key is
kept: what a rewind deletes is not said again, and the turn does not run again. The same holds if its note is forgotten.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from controllers.records import COUNTED_KEY, StoredResult, TurnRecord
from controllers.session_log.turn_notes import has_note

KEPT_ANSWERS = 8
"""How many answers are kept of a session's latest turns whose clients named a key, and as many of the others."""

CALL_KEY = "call-"
"""The prefix of the keys that front ends give to turns whose clients neither name a key nor count their tries."""

_MADE_KEY = re.compile(f"(?:{CALL_KEY}|{COUNTED_KEY})[0-9a-f]{{32}}")


def is_clients(key: str) -> bool:
    """Whether a client has named the key, judged by its form."""
    return _MADE_KEY.fullmatch(key) is None


def outdated(keys: Sequence[str]) -> list[int]:
    """The positions in `keys` of the answers to delete. `keys` are those of a session's answers, oldest first."""
    if len(keys) <= KEPT_ANSWERS:
        return []
    seen: Counter[bool] = Counter()
    places = []
    for place in range(len(keys) - 1, -1, -1):
        kind = is_clients(keys[place])
        seen[kind] += 1
        if seen[kind] > KEPT_ANSWERS:
            places.append(place)
    return places


def lost(turns: Iterable[int], ends: Mapping[int, int], length: int) -> list[int]:
    """Those of the `turns` that are not whole in a history of `length` tokens. `ends` are the ends of turns that have a
    note; a turn without one counts as cut."""
    return [turn for turn in turns if turn not in ends or ends[turn] > length]


def kept_of(record: TurnRecord) -> StoredResult:
    """What is kept of a turn that has a key."""
    assert record.idempotency_key is not None
    end_len = record.end_len if has_note(record) else None
    return StoredResult(record.idempotency_key, record.turn_index, record.result, record.digest, end_len)
