"""What the model thought, as an opaque text, for clients that send back nothing else of a reasoning item.

Such a client drops a reasoning item's content and keeps `encrypted_content`. Here that is the same text, encoded: it
contains nothing that the client has not been told.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

_MARK = "kedge-1:"
"""Marks our texts. Those of other servers cannot be read here."""


def encoded_thought(text: str) -> str:
    return _MARK + b64encode(text.encode()).decode()


def thought(item: Mapping[str, Any]) -> str:
    """The text of a canonical reasoning item; empty if it has none that can be read here."""
    content = "\n".join(part["text"] for part in item["content"])
    return content or _decoded(item["encrypted_content"] or "")


def _decoded(text: str) -> str:
    if not text.startswith(_MARK):
        return ""
    try:
        return b64decode(text.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
