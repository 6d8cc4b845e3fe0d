"""Groups of turns on their way to the session log, and the answers, as the bytes of messages.

The two ends may be of neighbouring versions. A record travels with the names of its fields: a reader skips those that
it does not know and uses the default of those that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from controllers.records import TurnRecord

T = TypeVar("T")


class UnreadableCommit(Exception):
    """The bytes are not a message that this version can read."""


_ENCODER = msgspec.msgpack.Encoder()
_RECORDS = msgspec.msgpack.Decoder(list[TurnRecord])
_HELD = msgspec.msgpack.Decoder(list[bool])


def encode_records(records: Sequence[TurnRecord]) -> bytes:
    return _ENCODER.encode(records)


def decode_records(body: bytes) -> list[TurnRecord]:
    """Raises UnreadableCommit."""
    return _decoded(_RECORDS, body)


def encode_held(held: Sequence[bool]) -> bytes:
    """An answer: for each turn of a group, whether the log holds it."""
    return _ENCODER.encode(held)


def decode_held(body: bytes) -> list[bool]:
    """Raises UnreadableCommit."""
    return _decoded(_HELD, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise UnreadableCommit(str(error)) from error
