"""How large a body may be, and how many values it may have.

Parsing JSON blocks the interpreter until it is done, on any thread. Its cost depends on values more than on bytes:
2 MiB of text take 0.2 ms, 2 MiB of empty lists 100 ms. So values are counted first, piece by piece: 2 to 4 ns a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import HTTPException

MIB = 1024 * 1024
BASE_BYTES = 4 * MIB
BYTES_PER_TOKEN = 64
"""Allowed for each token of the context: a token may be several characters, and a character six bytes in JSON."""

MOST_BYTES = 32 * MIB
MOST_STRINGS = 100_000
MOST_CONTAINERS = 32_768
"""Objects and lists. 4,096 messages with one tool call each have 16,384."""

BARE_BYTES_PER_VALUE = 8
"""Bytes outside strings, without white space, that a body may have for each value that it may have. Token ids need
about as many. The limit is for numbers of thousands of digits, whose bytes cost four times as much as others."""

PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of one request's body. `values` counts all values, and keys of objects, too."""

    size_bytes: int = MOST_BYTES
    values: int = 1_000_000

    @classmethod
    def of_context(cls, context_len: int, size_bytes: int | None = None) -> BodyLimits:
        """For a model of this context length: a prompt that fills it fits in, as text or as token ids. `size_bytes` is
        the operator's setting (None: derived from the context)."""
        by_context = min(MOST_BYTES, BASE_BYTES + BYTES_PER_TOKEN * context_len)
        return cls(by_context if size_bytes is None else size_bytes, MOST_STRINGS + 2 * context_len)

    def check_size(self, size_bytes: int) -> None:
        """Raises HTTPException if a body of this size is too large."""
        if size_bytes > self.size_bytes:
            raise HTTPException(413, f"The body is larger than {self.size_bytes} bytes.")

    def check_values(self, text: bytes) -> Iterator[None]:
        """Raises HTTPException if there are too many values. The count is exact for valid JSON; other text is refused
        here or by the parser.

        Iterate to check piece by piece: a piece takes a fraction of a millisecond.
        """
        yield from ValueCount(self).counted(text)


class ValueCount:
    """Counts the values of one body, or of several texts together."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._cut_escape = b""
        self._quotes = self._containers = self._separators = self._bare_bytes = 0

    def counted(self, text: bytes) -> Iterator[None]:
        """Counts a whole text, piece by piece. Raises HTTPException if there is too much."""
        for start in range(0, len(text), PIECE_BYTES):
            self._add(text[start : start + PIECE_BYTES])
            yield
        self._quotes += self._quotes % 2  # a text that is no JSON may end within a string
        self._cut_escape = b""

    def _add(self, piece: bytes) -> None:
        bare = (self._cut_escape + piece).replace(b"\\\\", b"")
        # The character that it escapes is in the next piece.
        self._cut_escape = b"\\" if bare.endswith(b"\\") else b""
        parts = bare.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._quotes % 2 :: 2]).translate(None, b" \t\r\n")
        self._quotes += len(parts) - 1
        self._containers += outside.count(b"[") + outside.count(b"{")
        self._separators += outside.count(b",") + outside.count(b":")
        self._bare_bytes += len(outside)
        self._check()

    def _check(self) -> None:
        strings, values = self._quotes // 2, self._containers + self._separators
        if strings > MOST_STRINGS:
            raise _too_many("strings", MOST_STRINGS)
        if self._containers > MOST_CONTAINERS:
            raise _too_many("objects and lists", MOST_CONTAINERS)
        if values > self._limits.values:
            raise _too_many("values", self._limits.values)
        most_bytes = BARE_BYTES_PER_VALUE * self._limits.values
        if self._bare_bytes > most_bytes:
            raise _too_many("bytes outside strings", most_bytes)


def _too_many(kind: str, most: int) -> HTTPException:
    return HTTPException(413, f"The body has more than {most} {kind}.")
