"""What the model thought, in the form in which clients that keep nothing but opaque texts send it back.

Such a client drops a reasoning item's content and keeps `encrypted_content`. It is the same text, encoded: there is
nothing in it that the client has not been told.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

_MARK = "kedge-1:"
"""Tells our texts from those of other servers, which nobody here can read."""


def encoded_thought(text: str) -> str:
    return _MARK + b64encode(text.encode()).decode()


def thought(item: Mapping[str, Any]) -> str:
    """Of a canonical reasoning item. Empty if there is nothing in it that a model can be told."""
    content = "\n".join(part["text"] for part in item["content"])
    return content or _decoded(item["encrypted_content"] or "")


def _decoded(text: str) -> str:
    if not text.startswith(_MARK):
        return ""
    try:
        return b64decode(text.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
