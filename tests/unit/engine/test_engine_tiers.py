"""Forks, host memory and audits through the step loop. Copies end on other threads, and some fail."""

from __future__ import annotations

import errno
from concurrent.futures import Future

import pytest

from cache.disk_pause import LONGEST_PAUSE_S
from engine.api import EngineStopped, InvalidRequest, SessionBusy
from tests.unit.controllers.manual_clock import ManualClock
from tests.unit.engine.driver import VOCAB, request
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.null_runner import null_generate


def first_turn(rig: Rig, name: str, first: int) -> list[int]:
    prompt = list(range(first, first + 12))
    return prompt + rig.generate(request(f"{name}/1", prompt, 9, session_id=name)).token_ids


def next_turn(rig: Rig, name: str, history: list[int]) -> int:
    """Runs the session's next turn and checks its tokens. Returns the number of cached tokens."""
    rig.outcomes.pop(f"{name}/2", None)
    spec = request(f"{name}/2", [7], 6, history=history, history_len=len(history), session_id=name)
    outcome = rig.generate(spec)
    assert outcome.token_ids == null_generate([*history, 7], 6, VOCAB)
    return outcome.cached


def test_sessions_beyond_the_pool_rest_in_host_memory() -> None:
    with running(num_pages=12, host_pages=64) as rig:
        histories = {name: first_turn(rig, name, 1 + 20 * number) for number, name in enumerate("abcd")}
        for name, history in histories.items():
            assert next_turn(rig, name, history) == 20, "nothing was computed twice"
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert stats.demotions_to_host >= 4
    assert stats.promotions_from_host >= 3
    assert stats.demotions_to_log == 0
    assert 0 < stats.host.used_bytes <= stats.host.budget_bytes


@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_copy_that_fails_costs_time_not_tokens(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(num_pages=12, host_pages=64) as rig:

        def broken(*_args: object) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(RuntimeError("bus error"))
            return future

        monkeypatch.setattr(rig.runner, operation, broken)
        histories = {name: first_turn(rig, name, 1 + 20 * number) for number, name in enumerate("abcd")}
        assert next_turn(rig, "a", histories["a"]) < 20
        rig.check()
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert stats.demotions_to_log > 0
    assert stats.promotions_from_host == 0


def test_sessions_beyond_host_memory_rest_on_disk() -> None:
    with running(num_pages=12, host_pages=32, disk_pages=64) as rig:
        histories = {name: first_turn(rig, name, 1 + 11 * number) for number, name in enumerate("abcdefgh")}
        for name, history in histories.items():
            assert next_turn(rig, name, history) == 20, "nothing was computed twice"
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert stats.demotions_to_disk >= 4
    assert stats.promotions_from_disk >= 4
    assert (stats.demotions_to_log, stats.disk_failures) == (0, 0)
    assert 0 < stats.disk.used_bytes <= stats.disk.budget_bytes


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_disk_that_fails_costs_time_not_tokens_and_is_logged_once(
    operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with running(num_pages=12, host_pages=32, disk_pages=64, clock=clock) as rig:

        def broken(*_args: object) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(OSError(28, "No space left on device"))
            return future

        load = rig.runner.load
        if operation == "write":
            monkeypatch.setattr(rig.runner, "spill", broken)
        else:
            monkeypatch.setattr(
                rig.runner,
                "load",
                lambda key, pages: (broken if key in rig.runner._spilled else load)(key, pages),
            )
        histories = {name: first_turn(rig, name, 1 + 11 * number) for number, name in enumerate("abcdefgh")}
        for name, history in histories.items():
            clock.advance(LONGEST_PAUSE_S)
            next_turn(rig, name, history)
        rig.check()
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert stats.disk_failures >= 2
    assert (stats.promotions_from_host > 0) == (operation == "write"), (
        "what could not be written stayed there"
    )
    assert stats.promotions_from_disk == 0
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_with_less_space_than_its_budget_drops_who_is_longest_there(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with running(num_pages=12, host_pages=32, disk_pages=400, clock=clock) as rig:
        spill = rig.runner.spill

        def full(source: int, key: int) -> Future[None]:
            if len(rig.runner._spilled) < 3:
                return spill(source, key)
            future: Future[None] = Future()
            future.set_exception(OSError(code, "no space"))
            return future

        monkeypatch.setattr(rig.runner, "spill", full)
        names = [f"s{number}" for number in range(24)]
        for number, name in enumerate(names):
            clock.advance(LONGEST_PAUSE_S)
            first_turn(rig, name, 1 + 3 * number)
        places = rig.engine.session_places(names).result(WAIT_S)
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    there = [name for name in names if name in places and places[name].tier == "disk"]
    assert 1 <= len(there) <= 3
    assert not {*there} & {*names[:8]}, "the first ones made room"
    assert stats.disk_failures >= 2


def test_fork_through_the_engine() -> None:
    with running() as rig:
        history = first_turn(rig, "a", 1)
        assert rig.engine.fork_session("a", "b", history, 10).result(WAIT_S) == 10
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {"a": 20, "b": 10}
        rig.engine.close_session("a").result(WAIT_S)
        assert next_turn(rig, "b", history[:10]) == 10


def test_a_fork_that_cannot_be_is_refused() -> None:
    with running() as rig:
        history = first_turn(rig, "a", 1)
        with pytest.raises(InvalidRequest, match="cannot fork itself"):
            rig.engine.fork_session("a", "a", history, 5)
        for length in (-1, len(history) + 1):
            with pytest.raises(InvalidRequest, match="history_len"):
                rig.engine.fork_session("a", "b", history, length)
        rig.hold()
        rig.submit(request("a/2", [5], 4, history=history, history_len=len(history), session_id="a"))
        rig.wait_held()
        futures = [rig.engine.fork_session(*pair, history, 5) for pair in (("a", "b"), ("c", "a"))]
        rig.go_on()
        for future in futures:
            assert isinstance(future.exception(WAIT_S), SessionBusy)
        rig.wait("a/2")
    with pytest.raises(EngineStopped):
        rig.engine.fork_session("a", "b", history, 5)
    with pytest.raises(EngineStopped):
        rig.engine.audit()


def test_an_audit_beside_running_turns_is_clean() -> None:
    with running(num_pages=64, window_len=8, num_window_pages=64, host_pages=16) as rig:
        first_turn(rig, "a", 1)
        rig.hold()
        rig.submit(request("r", range(1, 30), 40))
        rig.wait_held()
        audit = rig.engine.audit()
        rig.go_on()
        report = audit.result(WAIT_S)
        assert report.clean, report
        assert set(report.pools) == {"full", "window"}
        assert report.pools["full"].in_flight > 0
        assert str(report) == "the books balance"
