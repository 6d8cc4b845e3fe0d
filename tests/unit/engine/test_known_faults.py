"""Known faults of other servers' session caches, in the pages of a turn. Each test fails if the code that prevents the
fault is taken out.

Each heading names the fault. The faults of a turn's life are in test_known_faults_turns.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.sequence_kv import SequenceKV, pages_for
from cache.token_chain import Tokens
from engine.api import FinishReason, LogprobParams, StepFailed
from tests.unit.engine.driver import Driver, Talk, greedy, slot_kv
from tests.unit.engine.fault_rig import PAGE_SIZES, Guesser, Watch, driver_of, full_page_history

# a. The next turn starts below allocated_len and writes its page-table entries over pages that are then lost.


def gap_of_drafts(driver: Driver, talk: Talk, page_size: int) -> None:
    """A stop token ends the turn in a step with rejected drafts, which had pages."""
    end = 2 * page_size + 1 if page_size > 1 else 9
    for first in range(1, 40):
        prompt = [1 + (first + n) % 90 for n in range(end - 4)]
        expected = driver.oracle(prompt, 4)
        if expected[3] not in expected[:3]:
            break
    outcome = talk.turn(prompt, 40, sampling=greedy(40, stop_token_ids=frozenset({expected[3]})))
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.STOP, 4)


def gap_of_failed_step(driver: Driver, talk: Talk, page_size: int) -> None:
    """The turn already had its pages when its first step failed."""
    full_page_history(talk, page_size)
    spec = talk.spec([5, 6], 4)
    driver.add(spec)
    driver.fail_launch(StepFailed("the device is gone"))
    assert driver.outcomes[spec.request_id].finish is not None


def gap_of_rewind(_driver: Driver, talk: Talk, page_size: int) -> None:
    """The owner goes back by more than a page and does not tell the cache."""
    full_page_history(talk, page_size)
    del talk.history[-page_size - 1 :]


def gap_of_failed_commit(driver: Driver, talk: Talk, page_size: int) -> None:
    """A turn finished here, but was never written to the session log."""
    full_page_history(talk, page_size)
    driver.generate(talk.spec([1 + n % 90 for n in range(page_size)], 5))


def gap_of_prompt_only(_driver: Driver, talk: Talk, page_size: int) -> None:
    """Every token has KV. The next turn asks for log-probabilities of its input and recomputes the last token."""
    talk.turn([1 + n % 90 for n in range(2 * page_size + 1)], 0)


def gap_of_retraction(driver: Driver, talk: Talk, page_size: int) -> None:
    """The turn was retracted after it got its pages and before its first step. It will resume one token short."""
    full_page_history(talk, page_size)
    spec = talk.spec([5, 6], 6)
    driver.add(spec)
    assert driver.scheduler.schedule() is not None
    assert driver.scheduler.retract(spec.request_id)
    driver.check()
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])


Gap = Callable[[Driver, Talk, int], None]
AT_PARK: list[Gap] = [gap_of_drafts, gap_of_failed_step, gap_of_retraction]
AT_BEGIN: list[Gap] = [gap_of_rewind, gap_of_failed_commit, gap_of_prompt_only]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("make_gap", AT_PARK, ids=lambda make_gap: make_gap.__name__)
def test_a_tail_without_kv_is_freed_when_the_turn_gives_its_kv_back(make_gap: Gap, page_size: int) -> None:
    driver = driver_of(page_size, guesser=Guesser(0, 4) if make_gap is gap_of_drafts else None)
    watch = Watch(driver)
    talk = Talk(driver, "s")
    make_gap(driver, talk, page_size)
    assert any(tail.num_pages >= 1 for tail in watch.parked), "the gap reaches over a page border"
    talk.turn([7, 8, 9], 6)
    assert all(tail.num_tokens == 0 for tail in watch.begun)
    driver.cache.release_session("s")
    driver.assert_empty()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("make_gap", AT_BEGIN, ids=lambda make_gap: make_gap.__name__)
def test_a_tail_past_the_prefix_is_freed_once_before_a_turn_adds_pages(make_gap: Gap, page_size: int) -> None:
    driver = driver_of(page_size)
    talk = Talk(driver, "s")
    make_gap(driver, talk, page_size)
    watch = Watch(driver)
    logprobs = LogprobParams(input_start=len(talk.history)) if make_gap is gap_of_prompt_only else None
    talk.turn([7, 8, 9], 6, logprobs=logprobs)
    (tail,) = watch.begun
    assert tail.num_tokens >= 1
    assert tail.num_pages >= 1, "the gap reaches over a page border"
    talk.turn([10], 4)
    driver.cache.release_session("s")
    driver.assert_empty()


def test_in_the_common_case_there_is_no_tail_to_free() -> None:
    driver = driver_of(4)
    watch = Watch(driver)
    talk = Talk(driver, "s")
    for number in range(9):
        talk.turn([20 + number, 3], 3 + number)
    assert [tail.num_tokens for tail in watch.begun] == [0] * 8
    assert [tail.num_tokens for tail in watch.parked] == [0] * 9


# b. The token that is recomputed for its logits is subtracted from the prefix twice, or not at all.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_logit_reserve_is_taken_off_once(page_size: int) -> None:
    driver = driver_of(page_size)
    watch = Watch(driver)
    talk = Talk(driver, "s")
    assert talk.turn(range(1, 8), 5).cached == 0
    assert talk.turn([20], 4).cached == 12 - 1, "the last token was sampled and never run"
    assert talk.turn([21], 0).cached == 17 - 1
    outcome = talk.turn([22], 3)
    assert outcome.cached == 18, "after a turn without output every token of the history has KV"
    (spec, again) = (talk.spec([23], 3), talk.spec([23], 3))
    first = driver.generate(spec)[0]
    second = driver.generate(again)[0]
    assert (first.token_ids, first.cached) == (second.token_ids, len(talk.history) - 1)
    assert second.cached == len(talk.history), (
        "its history's last token got KV with the turn that came to nothing"
    )
    assert [tail.length for tail in watch.begun] == [11, 16, 18, 21, 22]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_equal_prompt_reuses_all_whole_pages_but_the_last_token(page_size: int) -> None:
    driver = driver_of(page_size)
    prompt = [1 + n % 90 for n in range(2 * page_size)]
    driver.generate(Talk(driver, "warm").spec(prompt, 2))
    assert Talk(driver, "s").turn(prompt, 2).cached == (len(prompt) - 1) // page_size * page_size
    assert Talk(driver, "t").turn([*prompt, 5], 2).cached == len(prompt)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_resumed_turn_gets_the_same_tokens_and_counts_its_cache_once(page_size: int, steps: int) -> None:
    driver = driver_of(page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 5)
    spec = talk.spec(range(40, 55), 9)
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    driver.scheduler.retract(spec.request_id)
    driver.run()
    outcome = driver.outcomes[spec.request_id]
    talk.commit(spec, outcome)
    assert outcome.cached == 34 - 1
    assert talk.turn([60], 3).cached == len(talk.history) - 4 - 1


# c. A page that still holds committed tokens is freed because it is not full.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_part_filled_page_stays(page_size: int) -> None:
    """At a turn's begin and end, at a rewind and at a rollback. The cut is on a page border, one before or one
    after."""
    driver = driver_of(page_size)
    for keep in {2 * page_size + 1, 2 * page_size, max(2 * page_size - 1, 1), page_size + page_size // 2}:
        talk = Talk(driver, f"s{keep}")
        talk.turn([1 + (keep + n) % 90 for n in range(2 * page_size)], 5)
        driver.cache.rewind_session(talk.session_id, keep)
        driver.check()
        kv = slot_kv(driver.cache, talk.session_id)
        # A shared page is never written, so a cut into the tree's prefix leaves full pages only.
        kept = keep if keep >= 2 * page_size else keep - keep % page_size
        assert (kv.committed_len, kv.num_pages) == (kept, pages_for(kept, page_size))
        assert talk.turn([50], 4, keep=keep).cached == kept
        spec = talk.spec([51, 52], 9)
        driver.add(spec)
        driver.step()
        driver.step()
        driver.abort(spec.request_id)
        kv = slot_kv(driver.cache, talk.session_id)
        assert (kv.committed_len, kv.num_pages) == (len(talk.history), pages_for(kv.committed_len, page_size))
        talk.turn([53], 4)
        driver.cache.release_session(talk.session_id)
    driver.assert_empty()


# d. A verify step accepts past max_new_tokens or past a stop. Then the next turn's tokens and KV disagree.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_what_a_verify_step_accepted_past_the_end_is_cut(page_size: int, end: str) -> None:
    driver = driver_of(page_size, guesser=Guesser(5, heeds_limit=False))
    talk = Talk(driver, "s")
    overshoots: list[int] = []
    finish_turn = driver.cache.finish_turn

    def watched(session_id: str, kv: SequenceKV, tokens: Tokens) -> None:
        overshoots.append(kv.committed_len - len(tokens))
        finish_turn(session_id, kv, tokens)

    driver.cache.finish_turn = watched  # type: ignore[method-assign]
    for number in range(14):
        before, new = len(talk.history), [1 + number, 2]
        stop_at = 1 + number % 7
        if end == "stop":
            expected = driver.oracle([*talk.history, *new], stop_at)
            sampling = greedy(60, stop_token_ids=frozenset({expected[-1]}))
        else:
            sampling = greedy(stop_at)
        outcome = talk.turn(new, sampling=sampling)
        assert 0 < len(outcome.token_ids) <= stop_at
        assert number == 0 or before - 1 <= outcome.cached <= before
        kv = slot_kv(driver.cache, "s")
        assert len(talk.history) - 1 <= kv.committed_len <= kv.allocated_len <= len(talk.history)
        assert (kv.draft_len, kv.num_pages) == (kv.committed_len, pages_for(kv.allocated_len, page_size))
    assert sum(overshoot > 0 for overshoot in overshoots) >= 4
    driver.cache.release_session("s")
    driver.assert_empty()
