"""A request that resumes after another engine was lost says what it would have said there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.api import Finish, FinishReason, GenerateRequest, InvalidRequest, LogprobParams, SamplingParams
from engine.settings import (
    SpeculationMethod,
)
from tests.unit.engine.driver import VOCAB, Driver, Outcome, Talk, greedy, request
from tests.unit.engine.engine_rig import WAIT_S, running
from tests.unit.engine.model_rig import ModelRig, running_model

PROMPT = [*range(300, 340), *range(300, 320)]
LENGTH = 24
WAYS = {
    "greedy": greedy(LENGTH),
    "sampled": SamplingParams(max_new_tokens=LENGTH, temperature=1.3, top_p=0.95, seed=7),
    "repetition": SamplingParams(max_new_tokens=LENGTH, repetition_penalty=1.3, seed=8),
    "counted": SamplingParams(
        max_new_tokens=LENGTH, frequency_penalty=0.4, presence_penalty=0.3, logit_bias={40: 3.0}, seed=9
    ),
}


class CountingWatcher:
    """Finds a "stop string" at the token with this number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._seen = 0

    def accept(self, token_id: int) -> str | None:  # noqa: ARG002
        self._seen += 1
        return "STOP" if self._seen == self._number else None


@pytest.fixture(scope="module", params=["off", "ngram"])
def model(request: pytest.FixtureRequest) -> Iterator[ModelRig]:
    with running_model(request.param) as rig:
        yield rig


def say(model: ModelRig, **options: Any) -> Outcome:
    """Generates without cached prefixes, so that every request computes what it needs."""
    assert model.engine.flush().result(WAIT_S)
    return model.generate(request(model.new_name(), PROMPT, **options))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_goes_on_as_if_it_had_begun(model: ModelRig, way: str) -> None:
    """Penalties count the tokens that were said elsewhere, and random numbers go on from there."""
    options = {"sampling": WAYS[way], "logprobs": LogprobParams(output=True, top=2)}
    whole = say(model, **options)
    assert len(whole.token_ids) == LENGTH
    for known in (1, 9, LENGTH - 1, LENGTH):
        resumed = say(model, **options, resumed_tokens=whole.token_ids[:known])
        assert resumed.token_ids == whole.token_ids
        assert resumed.finish == whole.finish
        assert [entry.token_id for entry in resumed.logprobs] == whole.token_ids[known:]
        assert [entry.logprob for entry in resumed.logprobs] == pytest.approx(
            [entry.logprob for entry in whole.logprobs[known:]], abs=1e-4
        )


def test_drafts_are_proposed_from_what_is_resumed(model: ModelRig) -> None:
    told = [*PROMPT[:30], *PROMPT[:20]]
    outcome = say(model, sampling=greedy(len(told) + 10), resumed_tokens=told)
    assert outcome.last is not None
    assert (outcome.last.draft_tokens > 0) is model.speculates


@pytest.mark.parametrize(("ahead", "decode_steps"), [(False, 1), (True, 1), (True, 4)])
@pytest.mark.parametrize("speculation", ["off", "ngram", "draft"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_cut_gives_the_same_tokens(
    page_size: int, speculation: SpeculationMethod, ahead: bool, decode_steps: int
) -> None:
    driver = Driver(
        page_size=page_size, num_pages=256, speculation=speculation, ahead=ahead, decode_steps=decode_steps
    )
    whole = driver.oracle(range(1, 12), 9)
    for known in range(10):
        (outcome,) = driver.generate(request(f"r{known}", range(1, 12), 9, resumed_tokens=whole[:known]))
        assert outcome.token_ids == whole
        assert outcome.reason is FinishReason.LENGTH
        assert outcome.last is not None
        assert (outcome.last.prompt_tokens, outcome.last.completion_tokens) == (11, 9)
        assert outcome.cached <= 11
    driver.assert_empty()


def test_a_seed_goes_on_from_its_place() -> None:
    driver = Driver()
    params = SamplingParams(max_new_tokens=12, seed=5)
    whole = driver.oracle([1, 2, 3], 12, params)
    (outcome,) = driver.generate(request("r", [1, 2, 3], sampling=params, resumed_tokens=whole[:7]))
    assert outcome.token_ids == whole != driver.oracle([1, 2, 3], 12)


def test_a_turn_ends_in_its_session() -> None:
    """On the engine that knows the session, and on an engine without KV of it."""
    for driver in (Driver(), Driver()):
        talk = Talk(driver, "s")
        talk.history = [*range(1, 10), *driver.oracle(range(1, 10), 4)]
        whole = driver.oracle([*talk.history, 50, 51], 8)
        assert talk.turn([50, 51], 8, resumed_tokens=whole[:5]).token_ids == whole
        assert talk.turn([52], 4).cached == len(talk.history) - 6
        driver.cache.release_session("s")
        driver.assert_empty()


@pytest.mark.parametrize("end", ["limit", "stop token", "stop string"])
@pytest.mark.parametrize("known", [3, 6])
def test_what_ends_a_request_ends_it_where_it_would_have(end: str, known: int) -> None:
    """It ends at the sixth token. If this token is known already, nothing is computed."""
    driver = Driver()
    talk = Talk(driver, "s")
    talk.turn([1, 2], 4)
    whole = driver.oracle([*talk.history, 9], 6)
    sampling, finish = {
        "limit": (greedy(6), Finish(FinishReason.LENGTH)),
        "stop token": (
            greedy(20, stop_token_ids=frozenset(whole[-1:])),
            Finish(FinishReason.STOP, matched=whole[-1]),
        ),
        "stop string": (greedy(20), Finish(FinishReason.STOP, matched="STOP")),
    }[end]
    watcher = CountingWatcher(6) if end == "stop string" else None
    driver.batches.clear()
    spec = talk.spec([9], sampling=sampling, watcher=watcher, resumed_tokens=whole[:known])
    (outcome,) = driver.generate(spec)
    assert outcome.token_ids == whole
    assert outcome.finish == finish
    assert (len(driver.batches) == 0) is (known == 6)
    assert outcome.last is not None
    assert (outcome.last.prompt_tokens, outcome.last.completion_tokens) == (7, 6)
    talk.commit(replace(spec, sampling=greedy(6)), outcome)
    talk.turn([10], 4)
    driver.cache.release_session("s")
    driver.assert_empty()


def test_log_probabilities_are_those_of_the_new_tokens() -> None:
    driver = Driver()
    whole = driver.oracle([1, 2, 3], 6)
    wanted = LogprobParams(output=True, top=1, input_start=0)
    (outcome,) = driver.generate(request("r", [1, 2, 3], 6, logprobs=wanted, resumed_tokens=whole[:4]))
    assert [entry.token_id for entry in outcome.logprobs] == whole[4:]
    assert outcome.input_logprobs == []


def test_what_is_resumed_is_not_counted_as_generated() -> None:
    driver = Driver()
    driver.generate(request("r", [1, 2, 3], 6, resumed_tokens=driver.oracle([1, 2, 3], 4)))
    assert driver.counters.generated_tokens == 2


def test_a_cached_answer_is_no_cached_input() -> None:
    driver = Driver(page_size=1)
    (first,) = driver.generate(request("first", [1, 2, 3], 8))
    (again,) = driver.generate(request("again", [1, 2, 3], 8, resumed_tokens=first.token_ids[:7]))
    assert again.cached == 3
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("steps", range(5))
def test_retraction_and_abort_leave_no_trace(steps: int) -> None:
    """While the request waits, in mid-prefill and in mid-decode. The resumed tokens are reported once."""
    driver = Driver()
    prompt = list(range(1, 11))
    whole = driver.oracle(prompt, 12)
    for name, act in (("retract", driver.scheduler.retract), ("abort", driver.abort)):
        driver.add(request(name, prompt, 12, resumed_tokens=whole[:6]))
        assert driver.outcomes[name].token_ids == whole[:6]
        for _ in range(steps):
            driver.step()
        act(name)
        driver.run()
    assert driver.outcomes["retract"].token_ids == whole
    assert driver.outcomes["abort"].reason is FinishReason.ABORT
    driver.assert_empty()


BAD: dict[str, GenerateRequest] = {
    "more than were asked for": request("r", [1, 2], 3, resumed_tokens=[5, 6, 7, 8]),
    "more than the context holds": request("r", [3] * 250, 90, resumed_tokens=[5] * 7),
    "negative": request("r", [1, 2], 3, resumed_tokens=[5, -1]),
    "past the vocabulary": request("r", [1, 2], 3, resumed_tokens=[VOCAB]),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_its_output_is_refused(what: str) -> None:
    with running() as rig:
        with pytest.raises(InvalidRequest) as caught:
            rig.engine.submit(BAD[what])
        assert caught.value.param == "resumed_tokens"
        full = rig.generate(request("full", [3] * 250, 90, resumed_tokens=[5] * 6))
        assert (full.token_ids, full.reason) == ([5] * 6, FinishReason.LENGTH)


def test_a_watcher_that_fails_over_resumed_tokens_ends_its_request_only() -> None:
    class Broken:
        def accept(self, token_id: int) -> str | None:
            raise RuntimeError(f"cannot decode {token_id}")

    driver = Driver()
    talk = Talk(driver, "s")
    (outcome,) = driver.generate(talk.spec([1, 2], watcher=Broken(), resumed_tokens=[7, 8]))
    assert outcome.reason is FinishReason.ERROR
    talk.turn([1, 2], 4)
