"""Keeps calls from a server that does not answer, and finds out, at little cost, when it does again.

A caller that waits for a dead server does nothing else meanwhile. So once it has waited in vain, calls are refused at
once, and the server is only probed.
"""

from __future__ import annotations

from collections.abc import Callable

REST_S = 0.3
"""Between two probes. Together with the probe's own time and the pauses of who asks it makes less than a second."""

PROBE_S = 0.1
"""How long a probe may take: a tenth of what a call may, so that somebody who waits on the caller hardly notices."""

PATIENT_EVERY = 8
"""Of so many probes one has the time that a call has: a server may be slow, and yet be there."""


class CircuitBreaker:
    """Closed until `open`; then whoever asks whether it is closed has the server probed, as often as it may be.

    `probe` returns whether the server answers within so many seconds, of which a call has `call_timeout_s`. `timer`
    returns monotonic seconds. One user.
    """

    def __init__(
        self, probe: Callable[[float], bool], timer: Callable[[], float], *, call_timeout_s: float
    ) -> None:
        self._probe = probe
        self._timer = timer
        self._call_timeout_s = call_timeout_s
        self._probes: int | None = None  # since it opened; None while it is closed
        self._rests_until_s = 0.0

    def open(self) -> None:
        """The server has not answered a call in time."""
        self._probes = 0
        self._rests_until_s = self._timer() + REST_S

    def closed(self) -> bool:
        """Whether calls may be made. Takes as long as a probe at most."""
        if self._probes is None:
            return True
        if self._timer() < self._rests_until_s:
            return False
        self._probes += 1
        patient = self._probes % PATIENT_EVERY == 0
        if self._probe(self._call_timeout_s if patient else PROBE_S):
            self._probes = None
            return True
        self._rests_until_s = self._timer() + REST_S
        return False
