"""Log-probabilities of output and of new input tokens: each position once, also over chunks and retraction."""

from __future__ import annotations

import pytest

from engine.api import LogprobParams
from engine.settings import SpeculationMethod
from tests.unit.engine.driver import Driver, Outcome, Talk, request
from tests.unit.engine.null_runner import FAKE_LOGPROB


def assert_input_logprobs(outcome: Outcome, tokens: list[int], start: int) -> None:
    """Checks that there is one entry for each token from `start` on. Only the very first token of a sequence has no
    value."""
    assert [entry.token_id for entry in outcome.input_logprobs] == tokens[start:]
    for position, entry in enumerate(outcome.input_logprobs, start):
        assert entry.logprob == (None if position == 0 else FAKE_LOGPROB)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 18])
def test_input_logprobs_over_chunk_borders(page_size: int, chunk_size: int, start: int) -> None:
    driver = Driver(page_size=page_size, chunk_size=chunk_size)
    prompt = list(range(10, 29))
    (outcome,) = driver.generate(request("r", prompt, 3, logprobs=LogprobParams(input_start=start)))
    assert_input_logprobs(outcome, prompt, start)
    assert outcome.token_ids == driver.oracle(prompt, 3)


@pytest.mark.parametrize("start", [0, 1, 12, 13, 18])
def test_input_logprobs_behind_a_cached_prefix(start: int) -> None:
    """The tree holds 16 tokens. The tokens that are asked for are computed again, with the token before them."""
    driver = Driver(page_size=4)
    prompt = list(range(10, 29))
    driver.generate(request("warm", prompt, 1))
    (outcome,) = driver.generate(request("r", prompt, 2, logprobs=LogprobParams(input_start=start)))
    assert_input_logprobs(outcome, prompt, start)
    assert outcome.cached == max(start - 1, 0) // 4 * 4 if start < 17 else 16


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_input_logprobs_of_a_later_turn(page_size: int) -> None:
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 14), 4)
    for offset in (0, 1, 2):
        history = list(talk.history)
        outcome = talk.turn([30, 31, 32], 4, logprobs=LogprobParams(input_start=len(history) + offset))
        assert_input_logprobs(outcome, [*history, 30, 31, 32], len(history) + offset)


SHARED = list(range(30, 46))


def long_session(driver: Driver) -> Talk:
    """A session with 30 tokens of history, which begin with a prefix that others share. Another session is in the pool,
    too."""
    driver.generate(request("warm", [*SHARED, 1], 1))
    talk = Talk(driver, "s")
    talk.turn([*SHARED, 50, 51, 52, 53], 10)
    Talk(driver, "other").turn([60, 61, 62], 4)
    return talk


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_size", [3, 64])
@pytest.mark.parametrize("start", [0, 1, 7, 15, 16, 17, 24, 28, 29, 30, 31])
def test_input_logprobs_of_the_history(page_size: int, chunk_size: int, start: int) -> None:
    """The tokens that are asked for are computed again. After that, session and pool are as after a turn that asked for
    nothing."""
    pools = []
    for logprobs in (None, LogprobParams(input_start=start)):
        driver = Driver(page_size=page_size, chunk_size=chunk_size, num_pages=256)
        talk = long_session(driver)
        history = list(talk.history)
        for _ in range(3):
            outcome = talk.turn([70, 71, 72], 4, logprobs=logprobs)
            if logprobs is not None:
                assert_input_logprobs(outcome, [*history, 70, 71, 72], start)
                assert outcome.cached <= max(start - 1, 0)
            history = list(talk.history)
        assert driver.held("s") == len(history) - 1
        accounts = driver.cache.books.accounts()
        pools.append((accounts.free, accounts.cached + accounts.protected + accounts.session))
        assert talk.turn([73], 2).cached == len(history) - 1
        for name in ("s", "other"):
            driver.cache.release_session(name)
        driver.assert_empty()
    assert pools[0] == pools[1], "no page more, none less"


@pytest.mark.parametrize("window_len", [3, 8, 20])
@pytest.mark.parametrize("start", [0, 2, 17, 25, 29])
def test_input_logprobs_of_the_history_where_the_window_has_passed(window_len: int, start: int) -> None:
    driver = Driver(num_pages=128, window_len=window_len, num_window_pages=128)
    talk = long_session(driver)
    for _ in range(3):
        history = list(talk.history)
        outcome = talk.turn([70, 71, 72], 4, logprobs=LogprobParams(input_start=start))
        assert_input_logprobs(outcome, [*history, 70, 71, 72], start)
    history = list(talk.history)
    assert talk.turn([73], 2).cached == len(history) - 1, "the end of the window is there"
    for name in ("s", "other"):
        driver.cache.release_session(name)
    driver.assert_empty()


@pytest.mark.parametrize("end", ["retract", "abort"])
@pytest.mark.parametrize("steps", [1, 2, 4, 6, 9, 12])
@pytest.mark.parametrize("window_len", [None, 8])
@pytest.mark.parametrize("start", [0, 9])
def test_input_logprobs_of_the_history_come_once_or_not_at_all(
    start: int, window_len: int | None, steps: int, end: str
) -> None:
    """The turn is retracted, or aborted and asked again, while it computes the history or later."""
    driver = Driver(num_pages=128, chunk_size=5, window_len=window_len, num_window_pages=128)
    talk = long_session(driver)
    history = list(talk.history)
    spec = talk.spec([70, 71, 72], 9, logprobs=LogprobParams(output=True, input_start=start))
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    if end == "abort":
        driver.abort(spec.request_id)
        assert driver.held("s") <= len(history)
        spec = talk.spec([70, 71, 72], 9, logprobs=LogprobParams(output=True, input_start=start))
        driver.add(spec)
    else:
        driver.scheduler.retract(spec.request_id)
        driver.check()
    driver.run()
    outcome = driver.outcomes[spec.request_id]
    talk.commit(spec, outcome)
    assert_input_logprobs(outcome, [*history, 70, 71, 72], start)
    talk.turn([74], 3)
    for name in ("s", "other"):
        driver.cache.release_session(name)
    driver.assert_empty()


@pytest.mark.parametrize("start", [0, 9, 29])
@pytest.mark.parametrize("window_len", [None, 8])
def test_input_logprobs_of_a_history_that_lies_in_host_memory(start: int, window_len: int | None) -> None:
    driver = Driver(num_pages=24, host_pages=64, window_len=window_len, num_window_pages=24)
    talk = long_session(driver)
    history = list(talk.history)
    driver.generate(request("big", [9] * 80, 2))
    outcome = talk.turn([70, 71, 72], 4, logprobs=LogprobParams(input_start=start))
    assert driver.cache.tiers.num_to_host > 0
    assert_input_logprobs(outcome, [*history, 70, 71, 72], start)
    talk.turn([74], 3)


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_input_logprobs_of_the_history_beside_drafts(speculation: SpeculationMethod) -> None:
    driver = Driver(num_pages=128, speculation=speculation)
    talk = long_session(driver)
    for start in (0, 13, 29):
        history = list(talk.history)
        outcome = talk.turn([70, 71, 72], 20, logprobs=LogprobParams(input_start=start))
        assert_input_logprobs(outcome, [*history, 70, 71, 72], start)


def test_input_logprobs_of_the_history_when_steps_are_planned_ahead() -> None:
    driver = Driver(num_pages=128, ahead=True)
    talk = long_session(driver)
    driver.add(request("beside", [1, 2], 60))
    for start in (0, 13, 29):
        history = list(talk.history)
        outcome = talk.turn([70, 71, 72], 4, logprobs=LogprobParams(input_start=start))
        assert_input_logprobs(outcome, [*history, 70, 71, 72], start)


def test_what_a_session_gives_up_for_input_logprobs_counts_as_room_for_them() -> None:
    """The session's own KV is most of the pool. Its turn begins beside the running request, not after it."""
    driver = Driver(num_pages=32, page_size=4)
    talk = Talk(driver, "s")
    talk.turn([1 + n % 90 for n in range(90)], 4)
    driver.add(request("running", [1, 2], 20))
    driver.step()
    spec = talk.spec([70], 2, logprobs=LogprobParams(input_start=0))
    driver.add(spec)
    driver.step()
    assert driver.scheduler.num_running == 2
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])


def test_input_logprobs_come_once_when_the_prompt_is_retracted() -> None:
    driver = Driver(num_pages=16, page_size=2, chunk_size=2, max_batch_tokens=8)
    driver.add(request("first", [9], 24, priority=1))
    driver.step()
    prompt = list(range(20, 34))
    driver.add(request("r", prompt, 6, logprobs=LogprobParams(input_start=0)))
    driver.step_until(lambda: len(driver.outcomes["r"].input_logprobs) >= 4)
    driver.scheduler.retract("r")
    driver.check()
    driver.run()
    assert_input_logprobs(driver.outcomes["r"], prompt, 0)


@pytest.mark.parametrize("steps", range(1, 8))
def test_input_logprobs_come_once_wherever_a_turn_is_retracted(steps: int) -> None:
    driver = Driver(page_size=4, chunk_size=3)
    talk = Talk(driver, "s")
    talk.turn(range(1, 14), 4)
    start = len(talk.history)
    spec = talk.spec(range(20, 30), 6, logprobs=LogprobParams(output=True, input_start=start))
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    driver.scheduler.retract(spec.request_id)
    driver.check()
    driver.run()
    outcome = driver.outcomes[spec.request_id]
    talk.commit(spec, outcome)
    assert_input_logprobs(outcome, [*spec.history[:start], *spec.new_tokens], start)
    assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids


def test_output_logprobs_with_alternatives() -> None:
    driver = Driver()
    (outcome,) = driver.generate(request("r", [1, 2], 4, logprobs=LogprobParams(output=True, top=3)))
    assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
    assert all(len(entry.top) == 3 for entry in outcome.logprobs)


def test_no_logprobs_unless_asked() -> None:
    driver = Driver()
    (outcome,) = driver.generate(request("r", [1, 2], 4, logprobs=LogprobParams()))
    assert (outcome.logprobs, outcome.input_logprobs) == ([], [])


def test_input_logprobs_without_output() -> None:
    driver = Driver(chunk_size=4)
    prompt = list(range(10, 23))
    (outcome,) = driver.generate(request("r", prompt, 0, logprobs=LogprobParams(input_start=5)))
    assert_input_logprobs(outcome, prompt, 5)
    assert outcome.token_ids == []
