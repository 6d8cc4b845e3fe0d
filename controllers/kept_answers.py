"""Which of a session's answers can be had again. Pure.

A client that names a key may ask again much later. A turn without one gets a key from its front end, which repeats the
call at once if it gets no answer, as when the turn's replica is lost. So these are kept apart: however many turns come
without a key, those with one stay. The last turn's answer is always there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from controllers.records import COUNTED_KEY

KEPT_ANSWERS = 8
"""Of a session's latest turns whose clients named a key; and as many of the others."""

CALL_KEY = "call-"
"""How the keys begin that front ends give to turns whose clients neither name a key nor count their tries."""

_MADE_KEY = re.compile(f"(?:{CALL_KEY}|{COUNTED_KEY})[0-9a-f]{{32}}")


def is_clients(key: str) -> bool:
    """Whether a client has named the key, as far as one can see."""
    return _MADE_KEY.fullmatch(key) is None


def outdated(keys: Sequence[str]) -> list[int]:
    """Of the keys of a session's answers, oldest first, the places of those that are to be forgotten."""
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
