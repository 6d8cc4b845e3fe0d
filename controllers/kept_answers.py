"""Which of a session's answers are kept for replays. Pure.

A client that names an idempotency key may repeat its request much later. A turn without a key gets one from its front
end, which repeats the call at once if it gets no answer, for example when the replica is lost. So the two kinds are
counted separately: turns without a client's key never displace answers of turns with one. The last turn's answer is
always kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from controllers.records import COUNTED_KEY

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
