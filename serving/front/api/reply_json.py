"""Replies as JSON. A reply is a struct that is written at once. Long lists are written some entries at a time and put
in afterwards: all log-probabilities of a large answer take seconds, which would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from serving.front.api.turn_headers import turn_headers
from serving.wire.turns import TurnEvent

T = TypeVar("T")

ENTRIES_AT_ONCE = 64
"""So many log-probabilities with twenty alternatives each take some milliseconds."""

_ENCODER = msgspec.json.Encoder()


class Reply(msgspec.Struct, kw_only=True):
    """Base of replies and their parts. A field that is UNSET is left out; a field that is None is null."""


def reply_json(reply: Reply | dict[str, Any] | None) -> bytes:
    """JSON of a reply, or of a dictionary that may contain replies. Infinite numbers and NaN become null."""
    return _ENCODER.encode(reply)


def or_unset(value: T | None) -> T | UnsetType:
    """The value of a field that is left out when it would be None."""
    return UNSET if value is None else value


async def list_items(entries: Sequence[T], shape: Callable[[T], Any]) -> bytes:
    """JSON of the shaped entries, with commas between them and no brackets. Other tasks run meanwhile."""
    texts: list[bytes] = []
    for start in range(0, len(entries), ENTRIES_AT_ONCE):
        await asyncio.sleep(0)  # before the first entries, too: an answer may have many short lists
        some = [shape(entry) for entry in entries[start : start + ENTRIES_AT_ONCE]]
        texts.append(_ENCODER.encode(some)[1:-1])
    return joined_items(texts)


def joined_items(texts: Iterable[bytes]) -> bytes:
    """Joins such texts, in order. Empty texts are skipped."""
    return b",".join(filter(None, texts))


def filled(text: bytes, name: str, items: bytes) -> bytes:
    """The JSON `text` with these items put into its empty list `name`.

    The list must be there. No string in the JSON can look like it: quotes in strings are escaped.
    """
    before, empty, after = text.partition(b'"%s":[]' % name.encode())
    assert empty, name
    return b'%s"%s":[%s]%s' % (before, name.encode(), items, after)


class TextTemplate:
    """JSON of replies that differ in one text only. `of` is such a reply with TEXT in that place. No text that others
    wrote may follow it in the JSON: it could contain TEXT."""

    TEXT = "\ue000"

    def __init__(self, of: Reply) -> None:
        self._before, found, self._after = reply_json(of).rpartition(_ENCODER.encode(self.TEXT))
        assert found

    def with_text(self, text: str) -> bytes:
        return b"%s%s%s" % (self._before, _ENCODER.encode(text), self._after)


def shown(text: bytes) -> str:
    """A token's text for display: broken characters become U+FFFD."""
    return text.decode("utf-8", "replace")


def json_reply(text: bytes, results: Sequence[TurnEvent]) -> Response:
    """A JSON reply. The headers describe its session's turn, of which a reply has at most one."""
    return Response(text, media_type="application/json", headers=turn_headers(results[0]))
