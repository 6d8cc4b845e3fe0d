"""Log-probabilities of output and of new input tokens: each position once, also over chunks and retraction."""

from __future__ import annotations

import pytest

from engine.api import LogprobParams
from engine.runner.null import FAKE_LOGPROB
from tests.unit.engine.driver import Driver, Outcome, Talk, request


def assert_input_logprobs(outcome: Outcome, tokens: list[int], start: int) -> None:
    """One entry for each token from `start` on; only the very first token of a sequence has none."""
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
    """The tree holds 16 tokens; what is asked for is computed again, with the token before it."""
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
