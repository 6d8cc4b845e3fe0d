"""The step loop on its thread: every caller gets an answer, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from cache.pages import BooksError
from engine.api import (
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    SessionBusy,
    StepFailed,
)
from engine.batch import ModelOutput, ScheduledBatch
from engine.runner.protocol import RunnerLost
from engine.settings import SchedulerSettings
from tests.unit.engine.driver import VOCAB, Panic, greedy, request, slot_kv
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.null_runner import null_generate

pytestmark = pytest.mark.usefixtures("ways_to_step")


def error_of(rig: Rig, request_id: str) -> Exception | None:
    finish = rig.wait(request_id)[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    return finish.error


def test_a_request_is_answered_exactly() -> None:
    with running() as rig:
        outcome = rig.generate(request("r", [1, 2, 3], 12))
    assert outcome.token_ids == null_generate([1, 2, 3], 12, VOCAB)


def test_a_session_over_several_turns() -> None:
    with running() as rig:
        history: list[int] = []
        for turn in range(5):
            new = [10 + turn, 11]
            spec = request(f"t{turn}", new, 6, history=history, history_len=len(history), session_id="s")
            outcome = rig.generate(spec)
            assert outcome.token_ids == null_generate([*history, *new], 6, VOCAB)
            assert outcome.cached == max(len(history) - 1, 0)
            history = [*history, *new, *outcome.token_ids]
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {"s": len(history) - 1}
        rig.engine.rewind_session("s", 7).result(WAIT_S)
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {"s": 7}
        rig.engine.close_session("s").result(WAIT_S)
        assert rig.engine.flush().result(WAIT_S) is True
        rig.check()
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {}


def test_the_longest_request_that_fits_runs() -> None:
    with running(num_pages=32) as rig:
        outcome = rig.generate(request("r", [1] * 100, 28))
    assert len(outcome.token_ids) == 28


def test_a_request_up_to_the_context_length_runs() -> None:
    with running(context_len=64) as rig:
        outcome = rig.generate(request("r", [1] * 63, 28))
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 1)


def test_a_shorter_context_can_be_asked_for() -> None:
    settings = SchedulerSettings(max_context_len=32)
    with running(scheduler=settings) as rig:
        assert rig.engine.max_context_len == 32
        assert len(rig.generate(request("r", [1] * 30, 28)).token_ids) == 2
        with pytest.raises(ContextLengthExceeded):
            rig.submit(request("long", [1] * 32))


def test_a_full_queue_refuses_also_before_the_engine_has_looked() -> None:
    rig = Rig(scheduler=SchedulerSettings(max_waiting=3))
    rig.submit(*(request(f"r{n}", [1, 2], 2) for n in range(3)))
    with pytest.raises(EngineOverloaded, match="3 requests are waiting"):
        rig.engine.submit(request("r3", [1, 2], 2))
    rig.engine.start()
    rig.wait("r0", "r1", "r2")
    rig.engine.stop(WAIT_S)


def test_a_second_turn_in_flight_is_answered_with_an_error() -> None:
    with running() as rig:
        rig.hold()
        rig.submit(request("one", [1, 2], 6, session_id="s"))
        rig.wait_held()
        rig.submit(request("two", [3], 6, session_id="s"))
        rig.go_on()
        assert isinstance(error_of(rig, "two"), SessionBusy)
        assert rig.wait("one")[0].token_ids == null_generate([1, 2], 6, VOCAB)


def test_abort_ends_a_running_request_and_its_session_stands() -> None:
    with running() as rig:
        first = rig.generate(request("one", [1, 2], 6, session_id="s"))
        history = [1, 2, *first.token_ids]
        rig.hold()
        rig.submit(request("two", [5], 100, history=history, history_len=8, session_id="s"))
        rig.wait_held()
        rig.engine.abort("two")
        rig.engine.abort("nobody")
        rig.go_on()
        assert rig.wait("two")[0].reason is FinishReason.ABORT
        again = rig.generate(request("three", [6], 4, history=history, history_len=8, session_id="s"))
        assert again.token_ids == null_generate([*history, 6], 4, VOCAB)
        assert again.cached in (7, 8)


def test_operations_on_a_session_in_a_turn_are_refused() -> None:
    with running() as rig:
        rig.hold()
        rig.submit(request("one", [1, 2], 6, session_id="s"))
        rig.wait_held()
        futures: list[Future[Any]] = [
            rig.engine.close_session("s"),
            rig.engine.rewind_session("s", 1),
            rig.engine.flush(),
            rig.engine.close_session("unknown"),
        ]
        rig.go_on()
        for future in futures[:2]:
            assert isinstance(future.exception(WAIT_S), SessionBusy)
        assert futures[2].result(WAIT_S) is False
        futures[3].result(WAIT_S)
        rig.wait("one")
        rig.engine.close_session("s").result(WAIT_S)


def test_a_negative_rewind_is_refused_and_changes_nothing() -> None:
    with running() as rig:
        rig.generate(request("one", [1, 2], 6, session_id="s"))
        with pytest.raises(InvalidRequest, match="cannot rewind to -1"):
            rig.engine.rewind_session("s", -1)
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {"s": 7}


def test_a_failed_step_fails_its_requests_only() -> None:
    settings = SchedulerSettings(max_running=1)
    with running(scheduler=settings) as rig:
        first = rig.generate(request("one", [1, 2], 6, session_id="s"))
        history = [1, 2, *first.token_ids]
        rig.runner.breaks = lambda batch: any(
            item.request_id == "two" and item.start > 9 for item in batch.items
        )
        rig.submit(
            request("two", [5], 20, history=history, history_len=8, session_id="s"),
            request("other", [7, 8], 9),
        )
        error = error_of(rig, "two")
        assert isinstance(error, StepFailed)
        assert "RuntimeError: device lost" in error.message
        assert rig.wait("other")[0].token_ids == null_generate([7, 8], 9, VOCAB)
        rig.runner.breaks = lambda _: False
        again = rig.generate(request("three", [6], 4, history=history, history_len=8, session_id="s"))
        assert again.token_ids == null_generate([*history, 6], 4, VOCAB)
        assert again.cached in (7, 8), "the session stands at its last commit, KV and all"


def test_a_panic_ends_the_engine_and_everyone_is_told() -> None:
    """Compiled code can raise what is no Exception."""
    rig = Rig()
    rig.runner.fault = Panic("in Rust")
    rig.runner.breaks = lambda _: True
    rig.submit(request("running", [1, 2], 50))
    places = rig.engine.session_places(["s"])
    rig.engine.start()
    error = error_of(rig, "running")
    assert isinstance(error, EngineStopped)
    assert "Panic: in Rust" in error.message
    assert places.result(WAIT_S) == {}
    with pytest.raises(EngineStopped):
        rig.engine.submit(request("late", [1]))
    rig.engine.stop(WAIT_S)
    assert not rig.engine.alive


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_lost_runner_ends_the_engine_and_everyone_is_told(where: str) -> None:
    """This includes requests that are not in the step: no later step could run."""
    rig = Rig(scheduler=SchedulerSettings(max_running=1))
    rig.submit(request("running", [1, 2], 50), request("waiting", [3], 5))
    launch = rig.runner.launch

    def broken(batch: ScheduledBatch) -> Any:
        if batch.items[0].start < 9:
            return launch(batch)
        if where == "launch":
            raise RunnerLost("no such device")
        return LostLaunch()

    rig.runner.launch = broken  # type: ignore[method-assign]
    rig.engine.start()
    for name in ("running", "waiting"):
        error = error_of(rig, name)
        assert isinstance(error, EngineStopped)
        assert "no such device" in error.message
    rig.engine.stop(WAIT_S)
    assert not rig.engine.alive


class LostLaunch:
    def result(self) -> ModelOutput:
        raise RunnerLost("no such device")


def test_stop_answers_running_and_waiting_requests() -> None:
    rig = Rig(scheduler=SchedulerSettings(max_running=1))
    rig.engine.start()
    rig.hold()
    rig.submit(request("running", [1, 2], 200), request("waiting", [3], 5))
    rig.wait_held()
    stopper = threading.Thread(target=rig.engine.stop, args=(WAIT_S,))
    stopper.start()
    rig.go_on()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    for name in ("running", "waiting"):
        assert isinstance(error_of(rig, name), EngineStopped)
    assert not rig.engine.alive
    rig.engine.stop(WAIT_S)
    for post in posts_of(rig):
        with pytest.raises(EngineStopped):
            post()


def posts_of(rig: Rig) -> list[Callable[[], object]]:
    engine = rig.engine
    return [
        lambda: engine.submit(request("late", [1])),
        lambda: engine.abort("late"),
        lambda: engine.close_session("s"),
        lambda: engine.rewind_session("s", 1),
        lambda: engine.flush(),
        lambda: engine.session_kv_tokens(),
    ]


def test_stop_before_start_answers_what_was_submitted() -> None:
    rig = Rig()
    rig.submit(request("r", [1, 2], 5))
    future = rig.engine.session_kv_tokens()
    rig.engine.stop(WAIT_S)
    assert isinstance(error_of(rig, "r"), EngineStopped)
    assert future.result(WAIT_S) == {}
    assert not rig.engine.alive


def test_stop_says_when_a_step_hangs() -> None:
    rig = Rig()
    rig.engine.start()
    rig.hold()
    rig.submit(request("r", [1, 2], 5))
    rig.wait_held()
    with pytest.raises(TimeoutError, match="did not end within"):
        rig.engine.stop(0.01)
    rig.go_on()
    rig.engine.stop(WAIT_S)
    assert isinstance(error_of(rig, "r"), EngineStopped)


def test_a_dead_loop_answers_everyone_even_when_no_account_can_be_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.engine.start()
    rig.hold()
    rig.submit(*(request(f"r{n}", [1, n + 1], 50, session_id=f"s{n}") for n in range(3)))
    rig.wait_held()

    def broken(*_args: object, **_options: object) -> None:
        raise BooksError("the books are on fire")

    monkeypatch.setattr(rig.engine._cache.books, "check", broken)
    for name in ("extend", "give_back", "finish", "finish_turn", "release_session"):
        monkeypatch.setattr(rig.engine._cache, name, broken)
    futures: list[Future[Any]] = [rig.engine.close_session("a"), rig.engine.session_kv_tokens()]
    rig.submit(request("late", [4], 3))
    for name in ("r0", "r1"):
        rig.engine.abort(name)
    rig.submit(request("later", [5], 3))
    rig.go_on()
    assert isinstance(futures[0].exception(WAIT_S), BooksError)
    futures[1].result(WAIT_S)
    for name in ("r0", "r1", "r2", "late", "later"):
        error = error_of(rig, name)
        assert isinstance(error, EngineStopped)
        assert "the books are on fire" in error.message
    rig.engine.stop(WAIT_S)
    assert not rig.engine.alive


def test_broken_books_stop_the_engine_and_are_named() -> None:
    rig = Rig()
    rig.engine.start()
    rig.generate(request("r", [1, 2], 5, session_id="s"))
    kv = slot_kv(rig.engine._cache, "s")
    kv.free_aligned(kv.protected_len)  # loses pages
    assert rig.engine.audit().result(WAIT_S).findings
    rig.submit(request("next", [1, 2], 5))
    error = error_of(rig, "next")
    assert isinstance(error, EngineStopped)
    assert "of pool full is leaked" in error.message


def test_a_sink_that_fails_once_still_gets_every_answer() -> None:
    rig = Rig()
    rig.engine.start()
    rig.hold()
    rig.submit(request("r", [1, 2], 1), request("other", [1, 3], 50))
    rig.wait_held()
    rig.sink_fault = RuntimeError("event loop is closed")
    rig.go_on()
    assert rig.wait("r")[0].token_ids == null_generate([1, 2], 1, VOCAB)
    assert isinstance(error_of(rig, "other"), EngineStopped)
    rig.engine.stop(WAIT_S)


def test_a_cancelled_future_is_left_alone() -> None:
    with running() as rig:
        rig.hold()
        rig.submit(request("r", [1, 2], 2))
        rig.wait_held()
        future = rig.engine.session_kv_tokens()
        assert future.cancel()
        rig.go_on()
        rig.wait("r")
        assert rig.engine.alive


def test_stats_add_up() -> None:
    with running() as rig:
        rig.generate(request("r", range(1, 21), 5, session_id="s"))
        rig.generate(request("r2", range(1, 21), 5, session_id="s2"))
        rig.check()
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert (stats.generated_tokens, stats.cached_tokens, stats.prefill_tokens) == (10, 16, 24)
    assert (stats.sessions, stats.running, stats.waiting, stats.retractions) == (2, 0, 0, 0)
    assert stats.steps > 0
    assert (stats.page_size, stats.page_size_bytes, stats.pages.leaked) == (4, 16, 0)


def test_sampled_requests_depend_on_their_seed_only() -> None:
    with running() as rig:
        sampling = greedy(9)
        for seed in (1, 2):
            params = type(sampling)(max_new_tokens=9, temperature=0.8, seed=seed)
            outcome = rig.generate(request(f"r{seed}", [1, 2], sampling=params))
            assert outcome.token_ids == null_generate([1, 2], 9, VOCAB, params=params)
