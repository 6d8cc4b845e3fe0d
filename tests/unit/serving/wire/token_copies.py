"""Counts the work of joining events: how many tokens each join copies."""

from __future__ import annotations

from typing import Any

import pytest

from serving.wire import turn_events
from serving.wire.turns import TurnEvent


def copies_of_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that from now on gets one entry for each join: the number of tokens that the join copied."""
    copied: list[int] = []
    replace = turn_events.replace

    def counting(event: TurnEvent, **changes: Any) -> TurnEvent:
        copied.append(len(changes.get("token_ids", ())))
        return replace(event, **changes)

    monkeypatch.setattr(turn_events, "replace", counting)
    return copied
