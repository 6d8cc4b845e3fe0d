"""Masks on the plain runner and on the GPU's: only allowed tokens are picked, and nothing else changes."""

from __future__ import annotations

import pytest

from engine.api import SamplingParams
from engine.batch import BatchItem, ScheduledBatch
from engine.models.loader import LoadedModel
from tests.unit.engine.runner import test_device_runner
from tests.unit.engine.runner.test_device_runner import (
    GREEDY,
    SAMPLED,
    VOCAB,
    both,
    item,
    make_pair,
    prompts,
)

loaded = test_device_runner.loaded
ALLOWED = (7, 40, 88)
MASK = sum(1 << token for token in ALLOWED).to_bytes(12, "little")
BIASED = SamplingParams(temperature=0.0, logit_bias={1: 90.0})


def held(index: int, tokens: list[int], params: SamplingParams, mask: bytes | None = MASK) -> BatchItem:
    made = item(index, tokens, 0, params, logprobs=True)
    assert made.sample is not None
    made.sample.allowed = mask
    return made


def test_constrained_rows_beside_free_ones(loaded: LoadedModel) -> None:
    """This includes a step that goes to the plain runner because of input log-probabilities. Free rows pick the same
    tokens as without constrained rows."""
    pair = make_pair(loaded, max_graph_tokens=16)
    texts = prompts(4)

    def items(mask: bytes | None) -> list[BatchItem]:
        return [
            held(0, texts[0], GREEDY, mask),
            item(1, texts[1], 0, GREEDY),
            held(2, texts[2], SAMPLED, mask),
            held(3, texts[3], BIASED, mask),
            item(4, texts[3], 0, SAMPLED),
        ]

    free, picks = both(pair, items(None)), both(pair, items(MASK))
    assert (picks[1], picks[4]) == (free[1], free[4])
    assert {picks[index][0] for index in (0, 2, 3)} <= set(ALLOWED)
    assert both(pair, [*items(MASK), item(5, texts[0], 0, None, input_logprobs_from=0)])[:5] == picks


def test_greedy_picks_the_likeliest_and_scores_are_the_models_own(loaded: LoadedModel) -> None:
    for runner in make_pair(loaded):
        text = prompts(1)[0]
        free = held(0, text, GREEDY, None)
        assert free.sample is not None
        free.sample.top_logprobs = VOCAB
        (output,) = runner.launch(ScheduledBatch([free])).result().items
        logprobs = dict(output.logprobs[0].top)
        (output,) = runner.launch(ScheduledBatch([held(0, text, GREEDY)])).result().items
        (entry,) = output.logprobs
        assert output.token_ids == (max(ALLOWED, key=logprobs.__getitem__),)
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        assert dict(entry.top) == pytest.approx({token: logprobs[token] for token, _ in entry.top}, abs=1e-4)
