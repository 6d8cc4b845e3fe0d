"""A server that does not answer is asked seldom and briefly. Its return is noticed at once."""

from __future__ import annotations

from manual_clock import ManualClock

from controllers.session_log.circuit_breaker import PATIENT_EVERY, PROBE_S, REST_S, CircuitBreaker

CALL_S = 1.0


class Server:
    """A server that answers a probe after `takes_s`, if the probe waits that long."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.takes_s = 3600.0
        self.waited_s = 0.0

    def probe(self, timeout_s: float) -> bool:
        took_s = min(self.takes_s, timeout_s)
        self.waited_s += took_s
        self._clock.advance(took_s)
        return self.takes_s <= timeout_s


def opened() -> tuple[CircuitBreaker, Server, ManualClock]:
    clock = ManualClock()
    server = Server(clock)
    breaker = CircuitBreaker(server.probe, clock, call_timeout_s=CALL_S)
    assert breaker.closed()
    assert not server.waited_s, "nothing is probed while all is well"
    breaker.open()
    return breaker, server, clock


def test_most_of_an_outage_is_not_spent_on_waiting() -> None:
    breaker, server, clock = opened()
    began_s = clock.now_s
    while clock.now_s < began_s + 300:
        assert not breaker.closed()
        clock.advance(0.01)
    assert server.waited_s < 0.45 * 300
    breaker.open()
    before_s = server.waited_s
    for _ in range(1000):
        assert not breaker.closed()
    assert server.waited_s == before_s, "between two probes nobody waits"


def test_a_return_is_noticed_with_the_next_probe() -> None:
    breaker, server, clock = opened()
    for _ in range(3 * PATIENT_EVERY):
        clock.advance(REST_S)
        assert not breaker.closed()
    server.takes_s = 0.001
    clock.advance(REST_S)
    assert breaker.closed()
    waited_s = server.waited_s
    clock.advance(3600)
    assert breaker.closed()
    assert server.waited_s == waited_s


def test_a_slow_server_is_found_too() -> None:
    """A server that takes longer than a probe may, but less than a call may, would otherwise count as away forever."""
    breaker, server, clock = opened()
    server.takes_s = (PROBE_S + CALL_S) / 2
    tries = 0
    while not breaker.closed():
        clock.advance(REST_S)
        tries += 1
    assert tries <= PATIENT_EVERY
