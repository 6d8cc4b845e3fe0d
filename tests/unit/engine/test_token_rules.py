"""Tokens that sampling parameters forbid by the output so far never come, however a request is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from engine.api import FinishReason, InvalidRequest, SamplingParams
from engine.request_check import RequestLimits, check_request
from engine.settings import (
    SpeculationMethod,
)
from engine.token_rules import TokenRules
from tests.unit.engine.driver import VOCAB, Driver, greedy, request
from tests.unit.engine.ladder import Ladder, mask
from tests.unit.engine.model_rig import MODEL, running_model
from tests.unit.engine.null_runner import EOS_TOKEN_ID, nearest_allowed

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6, 7]
LENGTH = 24


def by_hand(driver: Driver, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What the null runner says under the rules, which are written here a second time."""
    out: list[int] = []
    while len(out) < params.max_new_tokens:
        (own,) = driver.oracle([*prompt, *out], 1, params)
        allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
        if len(out) < params.min_new_tokens:
            allowed -= {EOS_TOKEN_ID, *params.stop_token_ids}
        allowed -= {word[-1] for word in params.bad_words if out[len(out) + 1 - len(word) :] == [*word[:-1]]}
        out.append(nearest_allowed(own, mask(sorted(allowed))))
        if out[-1] in {EOS_TOKEN_ID, *params.stop_token_ids}:
            break
    return out


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["plain", "ahead", "ahead by four"])
def driver(request: pytest.FixtureRequest) -> Driver:
    ahead, decode_steps = request.param
    return Driver(ahead=ahead, decode_steps=decode_steps)


def rules(driver: Driver) -> dict[str, SamplingParams]:
    plain = driver.oracle(PROMPT, LENGTH)
    few = tuple(sorted({*plain[:4], 11, 12, 13}))
    return {
        "min": greedy(LENGTH, min_new_tokens=9, stop_token_ids=frozenset(plain[2:6])),
        "allowed": greedy(LENGTH, allowed_token_ids=few),
        "words": greedy(LENGTH, bad_words=((plain[1],), tuple(plain[3:5]), tuple(plain[4:8]))),
        "all": greedy(LENGTH, min_new_tokens=5, allowed_token_ids=few, bad_words=((11,), (12, 13), (13, 13))),
        "sampled": SamplingParams(
            max_new_tokens=LENGTH, seed=5, min_new_tokens=6, stop_token_ids=frozenset(range(40, 60)),
            bad_words=((61,), (62, 63)),
        ),
    }  # fmt: skip


NAMES = ["min", "allowed", "words", "all", "sampled"]


@pytest.mark.parametrize("name", NAMES)
def test_each_token_is_the_pick_among_those_allowed(driver: Driver, name: str) -> None:
    params = rules(driver)[name]
    ruled, free = driver.generate(request("ruled", PROMPT, sampling=params), request("free", [9, 8], 30))
    assert ruled.token_ids == by_hand(driver, params)
    assert ruled.token_ids != driver.oracle(PROMPT, LENGTH, params)[: len(ruled.token_ids)]
    assert free.token_ids == driver.oracle([9, 8], 30)
    driver.assert_empty()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("known", [1, 4, 7])
def test_resumed_it_says_what_it_would_have_said(driver: Driver, name: str, known: int) -> None:
    """The output is counted from the turn's first token, wherever that was made."""
    params = rules(driver)[name]
    whole = by_hand(driver, params)
    spec = request("a", PROMPT, sampling=params, resumed_tokens=whole[:known])
    (outcome,) = driver.generate(spec)
    assert outcome.token_ids == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [1, 5])
def test_retracted_it_goes_on_where_it_was(driver: Driver, name: str, after: int) -> None:
    params = rules(driver)[name]
    driver.add(request("a", PROMPT, sampling=params))
    driver.step_until(lambda: len(driver.outcomes["a"].token_ids) >= after)
    driver.settle()
    driver.scheduler.retract("a")
    driver.run()
    assert driver.outcomes["a"].token_ids == by_hand(driver, params)


def test_behind_the_earliest_end_it_runs_like_any_other() -> None:
    """Several steps run at once as soon as nothing is forbidden any more."""
    driver = Driver(ahead=True, decode_steps=4)
    params = greedy(40, min_new_tokens=6)
    (outcome,) = driver.generate(request("a", PROMPT, sampling=params))
    assert outcome.token_ids == driver.oracle(PROMPT, 40)
    alone = [batch.num_steps for batch in driver.batches[:7]]
    assert alone == [1] * 7
    assert max(batch.num_steps for batch in driver.batches) == 4


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_begin_where_nothing_is_forbidden(method: SpeculationMethod) -> None:
    driver = Driver(speculation=method)
    plain = driver.oracle(PROMPT, LENGTH)
    params = greedy(LENGTH, min_new_tokens=8, stop_token_ids=frozenset(plain[3:5]))
    (outcome,) = driver.generate(request("a", PROMPT, sampling=params))
    assert outcome.token_ids == by_hand(driver, params)


def test_where_nothing_is_left_the_answer_ends(driver: Driver) -> None:
    params = greedy(LENGTH, allowed_token_ids=(11, 12), bad_words=((11,), (12, 12)))
    (outcome,) = driver.generate(request("a", PROMPT, sampling=params))
    assert (outcome.token_ids, outcome.reason) == ([12], FinishReason.STOP)


def test_beside_a_constraint_both_hold(driver: Driver) -> None:
    rungs = [3, 3, 3, 3]
    free = Ladder(rungs)
    (first,) = driver.generate(request("free", PROMPT, 10, constraint=free))
    params = greedy(10, bad_words=((first.token_ids[1],), tuple(first.token_ids[2:4])))
    held = Ladder(rungs)
    (outcome,) = driver.generate(request("held", PROMPT, sampling=params, constraint=held))
    assert outcome.token_ids == held.accepted
    assert outcome.token_ids[0] == first.token_ids[0]
    assert first.token_ids[1] not in outcome.token_ids


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (greedy(4, min_new_tokens=-1), "min_new_tokens"),
        (greedy(4, bad_words=((),)), "bad_words"),
        (greedy(4, bad_words=((VOCAB,),)), "bad_words"),
        (greedy(4, allowed_token_ids=(-1,)), "allowed_token_ids"),
    ],
)
def test_what_cannot_be_followed_is_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(request("a", PROMPT, sampling=params), RequestLimits(VOCAB, 64, 4, 64))
    assert refused.value.param == field


def test_without_parameters_there_are_no_rules() -> None:
    assert TokenRules.of(SamplingParams(), {EOS_TOKEN_ID}, VOCAB) is None


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_it_is_what_transformers_says(method: SpeculationMethod) -> None:
    """Greedy, in float32. The end token is one that the model says early."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompt = [*range(300, 330), *range(300, 310)]

    def theirs(**options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    plain = theirs(eos_token_id=1999)
    end = plain[4]
    words = [[plain[1]], plain[2:4], [plain[5], plain[6], plain[7]]]
    asked = {
        "min": (greedy(LENGTH, min_new_tokens=10), theirs(eos_token_id=end, min_new_tokens=10)),
        "words": (
            greedy(LENGTH, min_new_tokens=10, bad_words=tuple(map(tuple, words))),
            theirs(eos_token_id=end, min_new_tokens=10, bad_words_ids=words),
        ),
    }
    with running_model(method, end) as rig:
        for name, (params, expected) in asked.items():
            outcome = rig.generate(request(name, prompt, sampling=params))
            assert outcome.token_ids == expected, name
            assert len(expected) >= 10
        shorter = rig.generate(request("shorter", prompt, sampling=greedy(LENGTH)))
        assert shorter.token_ids == plain[: plain.index(end) + 1]
