"""Known faults of other servers' session caches, in a turn's life. Each test fails if the code that prevents the fault
is taken out.

Each heading names the fault. The faults in a turn's pages are in test_known_faults.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cache.sequence_kv import pages_for
from engine.api import (
    ContextLengthExceeded,
    EngineError,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    LogprobParams,
    RequestTooLarge,
    SessionBusy,
)
from tests.unit.engine.driver import VOCAB, Driver, Talk, greedy, request, slot_kv
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.fault_rig import Guesser, Watch, driver_of
from tests.unit.engine.null_runner import null_generate

PAGE_SIZES = (1, 4, 16)


def long_turn(talk: Talk) -> GenerateRequest:
    return talk.spec([1 + n % 90 for n in range(60)], 20)


# e. Counts of pages that have left the window are not reduced when lengths shrink, so pages are counted or freed twice.


@pytest.mark.parametrize("guesses", [0, 4])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window_len", [3, 8, 20])
def test_window_pages_are_settled_once_wherever_lengths_shrink(
    page_size: int, window_len: int, guesses: int
) -> None:
    """A rollback, a rewind, a stop among drafts and a shorter history, each followed by a turn that slides again."""
    driver = driver_of(
        page_size,
        window_len=window_len,
        num_window_pages=256,
        guesser=Guesser(guesses, 1) if guesses else None,
    )
    watch = Watch(driver)
    talk = Talk(driver, "s")
    talk.turn(range(1, 40), 9)
    for round_ in range(3):
        for steps in (1, 2, 4):
            spec = long_turn(talk)
            driver.add(spec)
            for _ in range(steps):
                driver.step()
            driver.abort(spec.request_id)  # rolls back, past a gap once the turn slid past its start
            assert driver.held("s") >= len(talk.history) - 1, "the rollback found its window"
            talk.turn([2, 3], 12)
        driver.cache.rewind_session("s", len(talk.history) - 2)
        driver.check()
        talk.turn([4 + round_], 12, keep=len(talk.history) - 2)
        driver.generate(talk.spec([5], 3 * page_size))  # is never committed
        talk.turn([6], 30)
        expected = driver.oracle([*talk.history, 7], 3)
        talk.turn([7], sampling=greedy(30, stop_token_ids=frozenset({expected[-1]})))
        driver.cache.rewind_session("s", 7)  # the window there is gone, so no KV is left
        driver.check()
        talk.turn([8] * 30, 12, keep=7)
    assert len(watch.begun) > 12
    driver.cache.release_session("s")
    driver.assert_empty()


# f. KV lent to a running turn is counted for its slot as well.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lent_kv_counts_for_the_turn_only_also_while_it_is_refused_and_retried(page_size: int) -> None:
    driver = driver_of(page_size, num_pages=128 // page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 20), 5)
    idle = driver.cache.books.accounts()
    driver.add(request("big", [90 - n for n in range(60)], 30, priority=1))
    driver.step()
    spec = long_turn(talk)
    driver.add(spec)
    refused = 0
    while driver.scheduler.num_waiting:
        accounts = driver.cache.books.accounts()
        assert accounts.session == idle.session, "the slot as it was"
        driver.step()
        refused += 1
    assert refused > 10
    while driver.scheduler.num_running:
        accounts = driver.cache.books.accounts()
        assert accounts.session == 0
        assert accounts.in_flight + accounts.protected > 0
        assert driver.cache.held_tokens() == {}
        driver.step()
    talk.commit(spec, driver.outcomes[spec.request_id])
    accounts = driver.cache.books.accounts()
    assert accounts.in_flight == 0
    assert accounts.session + accounts.protected == slot_kv(driver.cache, "s").num_pages


def test_a_turn_that_was_begun_and_found_no_room_gives_its_kv_back_each_time() -> None:
    """All other pages are on their way to the host. The turn begins, waits for them, and tries again."""
    driver = Driver(num_pages=12, page_size=4, host_pages=12, copies_wait=True)
    talk, other = Talk(driver, "s"), Talk(driver, "other")
    talk.turn(range(1, 12), 5)
    other.turn(range(40, 60), 13)
    spec = talk.spec(range(60, 80), 4)
    driver.add(spec)
    held = driver.held("s")
    for _ in range(5):
        assert driver.step() is None
        assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (1, 0)
        assert held <= driver.held("s") <= len(talk.history)
        assert driver.cache.books.accounts().in_flight == 0
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])
    assert driver.cache.tiers.num_to_host == 1
    other.turn([9], 4)


# g. An abort before admission (bad parameter, too long, busy) changes slot or history.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"new_tokens": []}, InvalidRequest),
        ({"new_tokens": [VOCAB]}, InvalidRequest),
        ({"new_tokens": [1], "max_new_tokens": -1}, InvalidRequest),
        ({"new_tokens": [1], "logprobs": LogprobParams(input_start=18)}, InvalidRequest),
        ({"new_tokens": [1] * 500}, ContextLengthExceeded),
        ({"new_tokens": [1] * 100, "max_new_tokens": 150}, RequestTooLarge),
    ],
)
def test_a_refused_turn_leaves_slot_and_history(options: dict[str, Any], error: type[EngineError]) -> None:
    with running(num_pages=48, context_len=400) as rig:
        history, before = open_session(rig)
        with pytest.raises(error):
            rig.submit(request("bad", history=history, history_len=len(history), session_id="s", **options))
        assert slot_of(rig) == before
        continue_session(rig, history, cached=len(history) - 1)


def test_a_busy_session_refuses_the_second_turn_and_the_first_goes_on() -> None:
    with running() as rig:
        history, _ = open_session(rig)
        rig.hold()
        rig.submit(turn_of("two", history, [7]))
        rig.wait_held()
        rig.submit(turn_of("three", history, [8]), turn_of("four", history, [9]))
        rig.go_on()
        for name in ("three", "four"):
            finish = rig.wait(name)[0].finish
            assert finish is not None
            assert isinstance(finish.error, SessionBusy)
        assert rig.wait("two")[0].token_ids == null_generate([*history, 7], 5, VOCAB)


def test_a_turn_aborted_while_it_waits_leaves_slot_and_history() -> None:
    with running() as rig:
        history, before = open_session(rig)
        rig.hold()
        rig.submit(request("running", [1, 2], 30))
        rig.wait_held()
        rig.submit(turn_of("two", history, [7]))
        rig.engine.abort("two")
        rig.go_on()
        assert rig.wait("two")[0].reason is FinishReason.ABORT
        rig.wait("running")
        assert slot_of(rig) == before
        continue_session(rig, history, cached=len(history) - 1)


def turn_of(name: str, history: list[int], new_tokens: list[int], max_new_tokens: int = 5) -> GenerateRequest:
    return request(
        name, new_tokens, max_new_tokens, history=history, history_len=len(history), session_id="s"
    )


def open_session(rig: Rig) -> tuple[list[int], tuple[object, ...]]:
    first = rig.generate(request("one", range(1, 12), 6, session_id="s"))
    return [*range(1, 12), *first.token_ids], slot_of(rig)


def slot_of(rig: Rig) -> tuple[object, ...]:
    def read() -> tuple[object, ...]:
        kv = slot_kv(rig.engine._cache, "s")
        return (kv.pages.tolist(), kv.allocated_len, kv.committed_len, kv.protected_len, id(kv.node))

    return rig.engine._call(read).result(WAIT_S)


def continue_session(rig: Rig, history: list[int], cached: int) -> None:
    outcome = rig.generate(turn_of("again", history, [5]))
    assert outcome.token_ids == null_generate([*history, 5], 5, VOCAB)
    assert outcome.cached == cached


# h. An abort in the first turn leaves KV, locks or a half-made session behind.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
@pytest.mark.parametrize("warm", [False, True])
def test_an_abort_in_the_first_turn_leaves_an_empty_usable_session(
    page_size: int, steps: int, warm: bool
) -> None:
    """The prompt has 20 tokens in chunks of 8. One or two steps end in mid-prefill, more in mid-decode. `warm` is with
    a shared prefix."""
    driver = Driver(page_size=page_size, num_pages=256)
    prompt = list(range(1, 21))
    if warm:
        driver.generate(request("warm", prompt[:16], 2))
    cached = driver.cache.books.accounts().cached
    talk = Talk(driver, "s")
    spec = talk.spec(prompt, 9)
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    driver.abort(spec.request_id)
    accounts = driver.cache.books.accounts()
    assert (accounts.protected, accounts.session, accounts.in_flight) == (0, 0, 0)
    assert accounts.cached >= cached
    assert driver.cache.num_sessions == 0
    assert not driver.scheduler.in_turn("s")
    talk.turn(prompt, 9)
    talk.turn([30], 3)
    driver.cache.release_session("s")
    driver.assert_empty()


# i. A turn that is aborted later, or whose session is closed, runs on, sends tokens after its end, or loses its KV.


def test_an_aborted_and_closed_turn_is_out_of_the_batch_within_two_steps() -> None:
    with running() as rig:
        history, _ = open_session(rig)
        batches: list[list[str]] = []
        rig.runner.breaks = lambda batch: bool(batches.append([item.request_id for item in batch.items]))
        rig.submit(request("other", [1, 2], 40))
        rig.hold()
        rig.submit(turn_of("two", history, [7], 100))
        rig.wait_held()
        rig.engine.abort("two")
        closed = rig.engine.close_session("s")
        since = len(batches)
        rig.go_on()
        outcome = rig.wait("two")[0]
        assert outcome.reason is FinishReason.ABORT
        closed.result(WAIT_S)
        rig.wait("other")  # a second end of "two" would have failed the sink
        assert not any("two" in batch for batch in batches[since + 2 :])
        assert len(batches) > since + 2
        assert outcome.token_ids == null_generate([*history, 7], 100, VOCAB)[: len(outcome.token_ids)]
        assert rig.engine.session_kv_tokens().result(WAIT_S) == {}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("speculates", [False, True])
def test_an_aborted_turn_leaves_the_kv_of_the_last_commit(page_size: int, speculates: bool) -> None:
    driver = driver_of(page_size, guesser=Guesser(2, 2) if speculates else None)
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 6)
    for steps in (1, 2, 3, 5):
        spec = talk.spec([40, steps], 50)
        driver.add(spec)
        for _ in range(steps):
            driver.step()
        driver.abort(spec.request_id)
        assert driver.held("s") == len(talk.history), "its last token got its KV"
        told = len(driver.outcomes[spec.request_id].token_ids)
        assert driver.step() is None
        assert len(driver.outcomes[spec.request_id].token_ids) == told
        assert talk.turn([50, steps], 4).cached == len(talk.history) - 4 - 2
    driver.cache.release_session("s")
    driver.assert_empty()


# j. Unrelated traffic splits a locked tree node. Locks come back wrong, or the session frees what the tree owns.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_locks_taken_are_locks_returned_after_others_split_the_node(page_size: int) -> None:
    driver = driver_of(page_size)
    prompt = [1 + n % 90 for n in range(6 * page_size)]
    talks = [Talk(driver, f"s{number}") for number in range(3)]
    for talk in talks:
        talk.turn(prompt, 5)
    for cut in (1, 3, 5, 2, 4):
        driver.generate(request(f"r{cut}", [*prompt[: cut * page_size], 95, cut, *prompt], 3))
        shared = slot_kv(driver.cache, "s0").pages[:6].tolist()
        assert slot_kv(driver.cache, "s2").pages[:6].tolist() == shared
        for talk in talks:
            talk.turn([cut, 7], 3)
    protected = driver.cache.books.accounts().protected
    for left, talk in enumerate(talks, -2):
        driver.cache.release_session(talk.session_id)
        driver.check()
        assert not {*shared} & {*driver.allocator.free_pages().tolist()}, "they are the tree's"
        assert driver.cache.books.accounts().protected == (protected if left else 0)
    assert (
        driver.generate(request("again", prompt, 2))[0].cached == 5 * page_size + (page_size - 1) // page_size
    )
    driver.assert_empty()


# k. A retracted turn is partly committed, or stays marked as in flight.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("speculates", [False, True])
def test_a_retracted_turn_commits_once(page_size: int, speculates: bool) -> None:
    driver = driver_of(page_size, guesser=Guesser(2, 2) if speculates else None)
    commits: list[tuple[str, int]] = []
    finish_turn = driver.cache.finish_turn

    def counted(session_id: str, kv: Any, tokens: Any) -> None:
        commits.append((session_id, len(tokens)))
        finish_turn(session_id, kv, tokens)

    driver.cache.finish_turn = counted  # type: ignore[method-assign]
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 6)
    spec = talk.spec([1 + n % 90 for n in range(70)], 24)
    driver.add(spec)
    for _ in range(4):
        driver.step()
        driver.scheduler.retract(spec.request_id)
        driver.check()
        assert len(talk.history) - 1 <= driver.held("s") <= len(talk.history), "nothing of it is committed"
        assert driver.scheduler.in_turn("s")
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])
    assert commits == [("s", 35), ("s", len(talk.history))]
    assert not driver.scheduler.in_turn("s")
    spec = talk.spec([5], 9)
    driver.add(spec)
    driver.step()
    driver.scheduler.retract(spec.request_id)
    driver.abort(spec.request_id)
    assert not driver.scheduler.in_turn("s")
    assert len(commits) == 2
    talk.turn([6], 3)


# l. Input log-probabilities from position 0 in a later turn crash, belong to the wrong tokens, or leak.


@pytest.mark.parametrize("start", [0, 1, 8, 16])
def test_input_logprobs_from_the_history_are_answered_and_the_slot_is_as_after_any_turn(start: int) -> None:
    with running(num_pages=24) as rig:
        history, _ = open_session(rig)
        for number in range(8):
            asked = turn_of(f"scored {number}", history, [7], 2)
            outcome = rig.generate(replace(asked, logprobs=LogprobParams(input_start=start)))
            assert [entry.token_id for entry in outcome.input_logprobs] == [*history, 7][start:]
            assert [entry.logprob is None for entry in outcome.input_logprobs].count(True) == (start == 0)
            assert outcome.cached <= max(start - 1, 0)
            history += [7, *outcome.token_ids]
            accounts = rig.engine._call(rig.engine._cache.books.accounts).result(WAIT_S)
            held = accounts.session + accounts.protected
            assert held == pages_for(len(history) - 1, 4), "what the session holds, and no page more"
            assert accounts.in_flight == 0
        continue_session(rig, history, cached=len(history) - 1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_input_logprobs_of_a_later_turn_cover_its_new_tokens(page_size: int, offset: int) -> None:
    driver = Driver(page_size=page_size, chunk_size=4, num_pages=256)
    talk = Talk(driver, "s")
    talk.turn(range(1, 14), 4)
    for max_new_tokens in (3, 0, 3):
        new = [30, 31, 32, 33, 34, 35, 36]
        logprobs = LogprobParams(input_start=len(talk.history) + offset)
        outcome = talk.turn(new, max_new_tokens, logprobs=logprobs)
        assert [entry.token_id for entry in outcome.input_logprobs] == new[offset:]
        assert all(entry.logprob is not None for entry in outcome.input_logprobs)
