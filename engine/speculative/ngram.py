"""Where a session's last few tokens occurred before, and what followed them there.

Hash chains as in LZ77 compressors (RFC 1951, section 4): `head` maps the hash of an n-gram to where its latest
occurrence ended, `previous` maps each such place to the one before it with the same hash. `previous` holds exactly the
earlier values of `head`, so appends can be undone exactly, one by one, however far back.

Legend: n tokens of an n-gram; a place p is a number of tokens, the n-gram "at p" is tokens p-n .. p-1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW_TOKENS = 48
"""Up to this many appended tokens, plain integers are faster than arrays."""

MOST_CANDIDATES = 8
"""How many earlier occurrences are looked at, latest first."""

LONGEST_MATCH = 16
"""Tokens beyond which a longer match is no better."""

_NOWHERE = 0
_FIRST_BITS = 8
_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: Fibonacci hashing, Knuth volume 3, section 6.4."""


@dataclass(frozen=True, slots=True)
class Match:
    """What followed an earlier occurrence of the last `length` tokens (at least n, at most LONGEST_MATCH)."""

    token_ids: tuple[int, ...]
    length: int


class NgramIndex:
    """Index of one growing token sequence, of which it keeps a copy. Takes 12 to 20 bytes per token.

    Appending a token, taking one back and a lookup cost the same however long the sequence is. Appending many at once
    is an array operation. A lookup compares tokens, so colliding hashes only make it look further.
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self._size = size
        self._tokens = array("i")
        self._previous = array("i", [_NOWHERE])  # by place 0 .. len(tokens)
        self._bits = _FIRST_BITS
        self._head = array("i", [_NOWHERE]) * 2**_FIRST_BITS

    def __len__(self) -> int:
        return len(self._tokens)

    def tail(self, count: int) -> list[int]:
        """The last tokens, up to `count`."""
        return self._tokens[-count:].tolist()

    def extend(self, token_ids: Sequence[int]) -> None:
        begin = len(self._tokens)
        self._tokens.extend(token_ids)
        if 2 * len(self._tokens) > len(self._head):
            self._rebuild()
        elif len(token_ids) <= FEW_TOKENS:
            for place in range(begin + 1, len(self._tokens) + 1):
                slot = self._slot(place)
                if slot is None:
                    self._previous.append(_NOWHERE)
                else:
                    self._previous.append(self._head[slot])
                    self._head[slot] = place
        else:
            self._link(begin + 1)

    def truncate(self, length: int) -> None:
        """Takes back all but the first `length` tokens, if there are more. Costs the smaller of the number taken back
        and `length`."""
        gone = len(self._tokens) - length
        if gone <= 0:
            return
        if gone > max(length, FEW_TOKENS):
            del self._tokens[length:]
            self._rebuild()
            return
        for place in range(len(self._tokens), max(length, self._size - 1), -1):
            slot = self._slot(place)
            assert slot is not None
            self._head[slot] = self._previous[place]
        del self._tokens[length:]
        del self._previous[length + 1 :]

    def propose(self, count: int) -> Match | None:
        """Up to `count` tokens that followed the longest earlier match of the last tokens; of equally long matches, the
        latest. What followed may overlap the end of the sequence; it is then continued periodically. None if the last n
        tokens are new."""
        end = len(self._tokens)
        if end < self._size or count < 1:
            return None
        last = self._tokens[max(0, end - LONGEST_MATCH) :]
        best_length, best_place = 0, _NOWHERE
        place = self._previous[end]
        for _ in range(MOST_CANDIDATES):
            if place == _NOWHERE:
                break
            length = self._match_length(last, place)
            if length > best_length:
                best_length, best_place = length, place
                if length == len(last):
                    break
            place = self._previous[place]
        if best_length < self._size:
            return None
        followed = self._tokens[best_place : best_place + count].tolist()
        period = end - best_place
        while len(followed) < count:
            followed.append(followed[-period])
        return Match(tuple(followed), best_length)

    def _match_length(self, last: array[int], place: int) -> int:
        """How many tokens before `place` equal the end of `last`."""
        earlier = self._tokens[max(0, place - len(last)) : place]
        if earlier == last:
            return len(last)
        length = 0
        for one, other in zip(reversed(earlier), reversed(last), strict=False):
            if one != other:
                break
            length += 1
        return length

    def _slot(self, place: int) -> int | None:
        """The slot of the n-gram at `place`; None if there are fewer than n tokens."""
        if place < self._size:
            return None
        mixed = 0
        for token in self._tokens[place - self._size : place]:
            mixed = (mixed + token + 1) * _MULTIPLIER & _MASK
        return mixed >> (64 - self._bits)

    def _slots(self, begin: int) -> NDArray[np.intp]:
        """Slots of the n-grams at places begin .. len(tokens), begin >= n."""
        tokens = np.frombuffer(self._tokens, dtype=np.int32)
        count = len(tokens) + 1 - begin
        mixed = np.zeros(count, dtype=np.uint64)
        for offset in range(self._size):
            first = begin - self._size + offset
            mixed += tokens[first : first + count].astype(np.uint64) + np.uint64(1)
            mixed *= np.uint64(_MULTIPLIER)
        return (mixed >> np.uint64(64 - self._bits)).astype(np.intp)

    def _link(self, begin: int) -> None:
        """Enters all places from `begin` on at once."""
        previous = np.zeros(len(self._tokens) + 1 - begin, dtype=np.int32)
        first = max(begin, self._size)
        if first <= len(self._tokens):
            slots = self._slots(first)
            head = np.frombuffer(self._head, dtype=np.int32)
            order = np.argsort(slots, kind="stable")
            ordered, places = slots[order], (order + first).astype(np.int32)
            before = np.empty_like(places)
            before[1:] = places[:-1]
            starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
            before[starts] = head[ordered[starts]]
            previous[first - begin :][order] = before
            ends = np.r_[starts[1:], len(ordered)] - 1
            head[ordered[ends]] = places[ends]
        self._previous.frombytes(previous.tobytes())

    def _rebuild(self) -> None:
        """Enters every place anew, with two to four slots per place."""
        self._bits = max(_FIRST_BITS, (2 * len(self._tokens)).bit_length())
        self._head = array("i", [_NOWHERE]) * 2**self._bits
        self._previous = array("i", [_NOWHERE])
        self._link(1)
