"""Refuses calls to a server that does not answer, and finds out cheaply when it answers again.

A caller that waits for a dead server does nothing else meanwhile. So after one call has timed out, calls are refused at
once, and the server is only probed.
"""

from __future__ import annotations

from collections.abc import Callable

REST_S = 0.3
"""Seconds between two probes. With the time of a probe and the pauses of the callers, that is less than a second."""

PROBE_S = 0.1
"""How long a probe may take. It is a tenth of a call's time, so that whoever waits for the caller hardly notices."""

PATIENT_EVERY = 8
"""One in this many probes may take as long as a call, for a server that is slow but there."""


class CircuitBreaker:
    """Closed until `open` is called. Then `closed` probes the server, at most every REST_S, until it answers.

    `probe` returns whether the server answers within the given number of seconds. A call may take `call_timeout_s`.
    `timer` returns monotonic seconds. One user.
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
        """To be called when the server has not answered a call in time."""
        self._probes = 0
        self._rests_until_s = self._timer() + REST_S

    def closed(self) -> bool:
        """Whether calls may be made. Takes at most as long as a probe."""
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
