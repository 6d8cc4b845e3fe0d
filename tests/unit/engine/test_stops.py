"""When a request ends: stop ids, end-of-sequence, stop strings, lengths. The first reason hides later ones."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, StepFailed
from tests.unit.engine.driver import Driver, Panic, Talk, greedy, request


class SpyWatcher:
    """Finds a "stop string" after `count` tokens. Keeps the tokens that it saw."""

    def __init__(self, count: int) -> None:
        self.seen: list[int] = []
        self._count = count

    def accept(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        return "STOP" if len(self.seen) == self._count else None


class BrokenWatcher:
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def accept(self, token_id: int) -> str | None:
        raise self._error(f"cannot decode {token_id}")


def test_length() -> None:
    driver = Driver()
    (outcome,) = driver.generate(request("r", [1, 2], 6))
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 6)


@pytest.mark.parametrize("chunk_size", [2, 8])
def test_max_new_tokens_zero_computes_the_prompt_and_samples_nothing(chunk_size: int) -> None:
    driver = Driver(chunk_size=chunk_size)
    talk = Talk(driver, "s")
    outcome = talk.turn(range(1, 7), 0)
    assert (outcome.reason, outcome.token_ids) == (FinishReason.LENGTH, [])
    assert driver.held("s") == 6
    assert talk.turn([9], 3).cached == 6
    assert all(batch.items[0].sample is None for batch in driver.batches[: -(-6 // chunk_size)])


def test_a_stop_id_is_delivered_and_named() -> None:
    driver = Driver()
    expected = driver.oracle([1, 2], 20)
    stop = expected[7]
    spec = request("r", [1, 2], sampling=greedy(20, stop_token_ids=frozenset({stop})))
    (outcome,) = driver.generate(spec)
    first = expected.index(stop)
    assert outcome.token_ids == expected[: first + 1]
    assert outcome.finish is not None
    assert (outcome.reason, outcome.finish.matched) == (FinishReason.STOP, stop)


def test_the_model_s_own_end_token_stops_unless_ignored() -> None:
    driver = Driver(eos_probability=0.2)
    prompts = [[n, n + 1] for n in range(1, 20)]
    outcomes = driver.generate(*(request(f"r{n}", prompt, 30) for n, prompt in enumerate(prompts)))
    stopped = 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        expected = driver.oracle(prompt, 30)
        assert outcome.token_ids == expected
        assert outcome.reason is (FinishReason.STOP if expected[-1] == 0 else FinishReason.LENGTH)
        stopped += expected[-1] == 0
    assert stopped > 5
    ignoring = [
        request(f"i{n}", prompt, sampling=greedy(30, ignore_eos=True)) for n, prompt in enumerate(prompts)
    ]
    for outcome in driver.generate(*ignoring):
        assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 30)


def test_a_stop_id_counts_even_when_end_tokens_are_ignored() -> None:
    driver = Driver(eos_probability=0.3)
    sampling = greedy(60, ignore_eos=True, stop_token_ids=frozenset({0}))
    (outcome,) = driver.generate(request("r", [1, 2], sampling=sampling))
    assert outcome.finish is not None
    assert (outcome.reason, outcome.finish.matched) == (FinishReason.STOP, 0)


def test_a_stop_string_ends_the_request_and_is_named() -> None:
    driver = Driver()
    watcher = SpyWatcher(4)
    (outcome,) = driver.generate(request("r", [1, 2], 20, watcher=watcher))
    assert outcome.finish is not None
    assert (outcome.reason, outcome.finish.matched) == (FinishReason.STOP, "STOP")
    assert watcher.seen == outcome.token_ids == driver.oracle([1, 2], 4)


def test_the_watcher_sees_every_token_once_also_over_a_retraction() -> None:
    driver = Driver()
    watcher = SpyWatcher(0)
    driver.add(request("r", range(1, 12), 9, watcher=watcher))
    for _ in range(5):
        driver.step()
    driver.scheduler.retract("r")
    driver.run()
    assert watcher.seen == driver.outcomes["r"].token_ids == driver.oracle(range(1, 12), 9)


def test_a_stop_string_on_the_last_token_wins_over_length() -> None:
    driver = Driver()
    (outcome,) = driver.generate(request("r", [1, 2], 4, watcher=SpyWatcher(4)))
    assert outcome.reason is FinishReason.STOP


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_watcher_that_raises_fails_its_request_only(error: type[BaseException]) -> None:
    driver = Driver()
    talk = Talk(driver, "s")
    talk.turn([1, 2, 3], 4)
    driver.add(request("other", [4, 5], 6))
    spec = talk.spec([6, 7], 6, watcher=BrokenWatcher(error))
    driver.add(spec)
    driver.run()
    finish = driver.outcomes[spec.request_id].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert isinstance(finish.error, StepFailed)
    assert "cannot decode" in finish.error.message
    assert driver.outcomes["other"].token_ids == driver.oracle([4, 5], 6)
    talk.turn([6, 7], 6)


def test_the_context_length_ends_a_request() -> None:
    driver = Driver(context_len=16)
    talk = Talk(driver, "s")
    outcome = talk.turn(range(1, 11), 6)
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 6)
    other = Driver(context_len=16)
    (short,) = other.generate(request("r", range(1, 11), 60))
    assert (short.reason, len(short.token_ids)) == (FinishReason.LENGTH, 6)


def test_a_turn_ended_by_a_stop_goes_on_exactly() -> None:
    driver = Driver(page_size=4)
    talk = Talk(driver, "s")
    for number in range(6):
        outcome = talk.turn([10 + number, 3], 20, watcher=SpyWatcher(3 + number))
        assert outcome.reason is FinishReason.STOP
    assert driver.held("s") == len(talk.history) - 1
