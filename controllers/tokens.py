"""Token ids as bytes, as logs and messages carry them: uint32, little endian, four bytes per token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4

_TYPECODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def encode_tokens(token_ids: Iterable[int]) -> bytes:
    """Packs token ids. Raises OverflowError for an id outside 0 to 2**32 - 1."""
    packed = array(_TYPECODE, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Unpacks token ids, four bytes each. Raises ValueError if `data` is not a whole number of tokens."""
    packed = array(_TYPECODE)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def count_tokens(data: bytes | bytearray) -> int:
    """Number of tokens in packed `data`."""
    return len(data) // TOKEN_BYTES
