"""Penalties that are updated token by token equal those computed anew, and an update costs only what is new."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.batch import SampleSpec, SeenTokens
from engine.runner import penalties as module
from engine.runner.penalties import PenaltyTable
from tests.unit.operations import bytecodes

VOCAB = 50
CASES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.25},
]


def reference(
    logits_V: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """The penalties token by token, as the parameters are defined."""
    edited_V = logits_V.clone()
    counts = Counter(output)
    for token in {*prompt, *output} if params.repetition_penalty != 1.0 else ():
        score = edited_V[token]
        edited_V[token] = (
            score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        )
    for token, count in counts.items():
        edited_V[token] -= params.frequency_penalty * count + params.presence_penalty
    return edited_V


@pytest.mark.parametrize("options", CASES, ids=str)
def test_token_by_token_they_are_the_definition(options: dict[str, float]) -> None:
    rng = random.Random(4)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    prompt = [rng.randrange(VOCAB) for _ in range(20)]
    table, seen = PenaltyTable(), SeenTokens(np.array(prompt), [])
    for turn in range(60):
        logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(turn))
        logits_V[turn % VOCAB] = float("-inf")
        before_V = logits_V.clone()
        penalties = table.of(SampleSpec(params, seen), logits_V)
        assert penalties is not None
        expected_V = reference(logits_V, params, prompt, seen.output)
        torch.testing.assert_close(penalties.apply(logits_V), expected_V)
        assert torch.equal(logits_V, before_V)
        seen.output.extend(rng.randrange(VOCAB) for _ in range(rng.randrange(3)))


def test_rows_of_a_step_are_edited_together_as_each_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row a step of 64 sequences took longer to edit than to compute on a card. What goes there goes at once."""
    rng = random.Random(5)
    choices: list[dict[str, Any]] = [*CASES, {}, {"logit_bias": {3: 1.0}}]
    params = [SamplingParams(**rng.choice(choices)) for _ in range(40)]
    seen = [SeenTokens(np.array([rng.randrange(VOCAB) for _ in range(20)]), []) for _ in params]
    specs = {
        row: SampleSpec(each, tokens if each.penalizes else None)
        for row, (each, tokens) in enumerate(zip(params, seen, strict=True))
        if row % 5  # the others are not edited
    }
    together, alone = PenaltyTable(), PenaltyTable()
    sent: list[int] = []
    send = module.send

    def counting(*args: Any) -> torch.Tensor:
        sent.append(1)
        return send(*args)

    monkeypatch.setattr(module, "send", counting)
    for step in range(6):
        logits_RV = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(step))
        logits_RV[:, step] = float("-inf")
        logits_RV[7, 4] = float("nan")
        expected_RV = logits_RV.clone()
        for row, spec in specs.items():
            penalties = alone.of(spec, logits_RV[row])
            if penalties is not None:
                expected_RV[row] = penalties.apply(logits_RV[row])
        sent.clear()
        together.apply(logits_RV, specs)
        torch.testing.assert_close(logits_RV, expected_RV, rtol=0, atol=0, equal_nan=True)
        assert len(sent) <= 3 or step == 0, "which rows, which tokens, and what they cost"
        for tokens in seen:
            tokens.output.extend(rng.randrange(VOCAB) for _ in range(rng.randrange(3)))


def test_untouched_logits_stay_what_they_were() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.1)
    logits_V = torch.tensor([0.0, -0.0, 1e-38, -1e-38, 3e38, -3e38, float("inf"), float("-inf"), 1.0, -1.0])
    penalties = PenaltyTable().of(SampleSpec(params, SeenTokens(np.array([8]), [9])), logits_V)
    assert penalties is not None
    assert torch.equal(penalties.apply(logits_V)[:8], logits_V[:8])


def test_a_copy_goes_its_own_way() -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.3)
    logits_V = torch.ones(VOCAB)
    penalties = PenaltyTable().of(SampleSpec(params, SeenTokens(np.array([8]), [9])), logits_V)
    assert penalties is not None
    before_V = penalties.apply(logits_V)
    copy = penalties.copy()
    copy.add([3])
    assert float(copy.apply(logits_V)[3]) == pytest.approx(1 / 1.3 - 0.3)
    assert torch.equal(penalties.apply(logits_V), before_V)
    assert (penalties.num_added, copy.num_added) == (1, 2)


def test_what_is_kept_of_a_run_goes_with_it() -> None:
    table, seen = PenaltyTable(), SeenTokens(np.array([8]), [9])
    table.of(SampleSpec(SamplingParams(repetition_penalty=1.3), seen), torch.ones(VOCAB))
    assert len(table._by_run) == 1
    del seen
    gc.collect()
    assert len(table._by_run) == 0


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_step_costs_its_own_token_however_many_there_are(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits_V = torch.ones(60_000)
    sent: list[int] = []
    send = module.send

    def counting(numbers: Sequence[int], *rest: object) -> torch.Tensor:
        sent.append(len(numbers))
        return send(numbers, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "send", counting)

    def step(num_tokens: int) -> int:
        table, seen = PenaltyTable(), SeenTokens(np.arange(num_tokens), [*range(num_tokens)])
        spec = SampleSpec(params, seen)
        table.of(spec, logits_V)
        sent.clear()

        def call() -> None:
            seen.output.append(7)
            penalties = table.of(spec, logits_V)
            assert penalties is not None
            penalties.apply(logits_V)

        count = bytecodes(call)
        assert set(sent) == {1}
        return count

    assert step(50_000) == step(100)
