"""What the headers of a reply say of its turn."""

from __future__ import annotations

from serving.front.api.turn_streams import TurnResult
from serving.wire.turns import TurnEvent

TURN_INDEX = "x-session-turn"
REPLAYED = "idempotent-replayed"


def turn_headers(output: TurnEvent | TurnResult) -> dict[str, str]:
    """Known from a turn's first event on: which of its session's turns it is, and whether it ran before."""
    headers = {}
    if output.turn_index is not None:
        headers[TURN_INDEX] = str(output.turn_index)
    if output.replayed:
        headers[REPLAYED] = "true"
    return headers
