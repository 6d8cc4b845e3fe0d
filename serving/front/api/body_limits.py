"""How large a body may be, and how much may be in it.

Parsing JSON holds the interpreter until it is done, on whatever thread, and costs by the value rather than by the byte:
2 MiB of text take 0.2 ms, 2 MiB of empty lists 100 ms. So values are counted first, which takes 1 to 2 ns a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import HTTPException

MIB = 1024 * 1024
BASE_BYTES = 4 * MIB
BYTES_PER_TOKEN = 64
"""Of a prompt that fills the context: a token may be some characters, and a character six bytes in JSON."""

MOST_BYTES = 32 * MIB
MOST_STRINGS = 100_000
MOST_CONTAINERS = 32_768
"""Objects and lists. 4,096 messages with a tool call each are 16,384."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one request's body. `values` counts all in it, keys of objects, too."""

    size_bytes: int = MOST_BYTES
    values: int = 1_000_000

    @classmethod
    def of_context(cls, context_len: int, size_bytes: int | None = None) -> BodyLimits:
        """For a model that takes so many tokens: what fills its context goes in, as text or as token ids.
        `size_bytes` is an operator's word."""
        by_context = min(MOST_BYTES, BASE_BYTES + BYTES_PER_TOKEN * context_len)
        return cls(by_context if size_bytes is None else size_bytes, MOST_STRINGS + 2 * context_len)

    def check_size(self, size_bytes: int) -> None:
        """Raises HTTPException."""
        if size_bytes > self.size_bytes:
            raise HTTPException(413, f"The body is larger than {self.size_bytes} bytes.")

    def check_values(self, text: bytes) -> None:
        """Raises HTTPException. Counts exactly in valid JSON; what is none is refused, here or by its parser."""
        bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings = bare.count(b'"') // 2
        if strings > MOST_STRINGS:
            raise _too_many(strings, "strings", MOST_STRINGS)
        outside = b"".join(bare.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        if containers > MOST_CONTAINERS:
            raise _too_many(containers, "objects and lists", MOST_CONTAINERS)
        values = containers + outside.count(b",") + outside.count(b":")
        if values > self.values:
            raise _too_many(values, "values", self.values)


def _too_many(count: int, kind: str, most: int) -> HTTPException:
    return HTTPException(413, f"The body has {count} {kind}; at most {most} are allowed.")
