"""The headers of a reply that describe its turn."""

from __future__ import annotations

from serving.wire.turns import TurnEvent

TURN_INDEX = "x-session-turn"
REPLAYED = "idempotent-replayed"


def turn_headers(output: TurnEvent) -> dict[str, str]:
    """Which of its session's turns it is, and whether it ran before. Both are known from the turn's first event on."""
    headers = {}
    if output.turn_index is not None:
        headers[TURN_INDEX] = str(output.turn_index)
    if output.replayed:
        headers[REPLAYED] = "true"
    return headers
