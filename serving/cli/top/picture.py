"""What is known of a cluster so far: its last state, the previous one for rates, and the events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.cli.client.watch import HAPPENED, STATE, WatchEvent

EVENTS_KEPT = 200


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one replica since the previous state."""

    generated: float
    prefill: float


class Picture:
    """Owned by the loop that reads the stream. `state` is None until the first one has come."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self.states_seen = 0
        self._before: dict[str, Any] | None = None

    def take(self, event: WatchEvent) -> None:
        if event.name == STATE:
            self._before, self.state = self.state, event.data
            self.states_seen += 1
        elif event.name == HAPPENED:
            self.events.append(event.data)

    def begin_again(self) -> None:
        """To be called when the stream breaks off: a new connection sends the last events again."""
        self.events.clear()
        self._before = None

    def rates(self, replica: Mapping[str, Any]) -> Rates | None:
        """None if there is no earlier state to compare with: for a new replica or a new stream."""
        if self._before is None or self.state is None:
            return None
        name = replica["replica"]
        before = next((each for each in self._before["replicas"] if each["replica"] == name), None)
        elapsed_s = float(self.state["at"]) - float(self._before["at"])
        names = ("generated_tokens", "prefill_tokens")
        if (
            before is None
            or elapsed_s <= 0
            or not all(each in row for each in names for row in (before, replica))
        ):
            return None
        grown = [max(0, int(replica[each]) - int(before[each])) / elapsed_s for each in names]
        return Rates(*grown)
