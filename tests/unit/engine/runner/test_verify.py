"""Drafts change when a token comes, never which token. Compared are the draws without drafts, and the distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.batch import BatchItem, ItemOutput, SampleSpec, SeenTokens
from engine.runner.penalties import PenaltyTable
from engine.runner.sampler import candidates, sample_row, token_logprobs
from engine.runner.verify import choose_tokens
from tests.unit.engine.runner.draw_counts import chi_square

VOCAB = 12
NO_PAGES = np.zeros(0, dtype=np.int32)
PENALTIES = PenaltyTable()


def model_logits(tokens: list[int]) -> torch.Tensor:
    """A "model": the scores of the next token [V] are a function of the last three tokens."""
    seed = sum(token * 31**power for power, token in enumerate(tokens[-3:]))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def item(tokens: list[int], drafts: list[int], spec: SampleSpec) -> BatchItem:
    return BatchItem("r", [*tokens, *drafts], 0, NO_PAGES, False, spec, num_drafts=len(drafts))


def verify(tokens: list[int], drafts: list[int], spec: SampleSpec) -> ItemOutput:
    rows = [model_logits([*tokens, *drafts[:count]]) for count in range(len(drafts) + 1)]
    return choose_tokens(torch.stack(rows), [item(tokens, drafts, spec)], PENALTIES)[0]


def generate(
    params: SamplingParams, count: int, draft_seed: int | None
) -> tuple[list[int], list[float], int]:
    """Generates up to `count` tokens. With `draft_seed` it uses drafts, most of which are right. Returns the tokens,
    their log-probabilities and the number of steps."""
    seen = SeenTokens(np.array([1, 2, 1]), [])
    tokens, logprobs, steps = [1, 2], [], 0
    truth = [1, 2]
    if draft_seed is not None:
        truth = generate(params, count, None)[0]
    random = np.random.default_rng(draft_seed)
    while len(tokens) < count:
        drafts = []
        if draft_seed is not None:
            right = truth[len(tokens) : len(tokens) + int(random.integers(0, 5))]
            drafts = [token if random.random() < 0.8 else int(random.integers(VOCAB)) for token in right]
        spec = SampleSpec(params, seen if params.penalizes else None, logprobs=True)
        before = [*seen.output]
        output = verify(tokens, drafts, spec)
        assert seen.output == before
        assert output.num_proposed == len(drafts)
        assert len(output.logprobs) == len(output.token_ids) <= len(drafts) + 1
        tokens += output.token_ids
        seen.output += output.token_ids
        logprobs += [entry.logprob or 0.0 for entry in output.logprobs]
        steps += 1
    return tokens[:count], logprobs[: count - 2], steps


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
        {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.2, "logit_bias": {3: 1.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [3, 77])
def test_tokens_are_those_without_drafts(params: dict[str, Any], seed: int) -> None:
    sampling = SamplingParams(seed=seed, **params)
    tokens, logprobs, steps = generate(sampling, 120, None)
    with_drafts = generate(sampling, 120, draft_seed=seed)
    assert with_drafts[0] == tokens
    assert with_drafts[1] == pytest.approx(logprobs, abs=1e-6)
    assert with_drafts[2] < 0.7 * steps


@pytest.mark.parametrize("draft", ["likely", "unlikely"])
def test_one_step_follows_the_target_distribution(draft: str) -> None:
    """Over many seeds, the first token follows the target's distribution, and a draft is accepted as often as it is
    likely. The token in place of a rejected draft is distributed as the rest (Leviathan et al. 2023, theorem 3.5)."""
    draws, tokens = 4000, [4, 5]
    params = SamplingParams(temperature=1.1, top_k=9)
    probs_V = filtered(model_logits(tokens), params)
    order = probs_V.argsort(descending=True).tolist()
    guess = order[0] if draft == "likely" else order[5]
    second_V = filtered(model_logits([*tokens, guess]), params)
    firsts, seconds, replacements = Counter[int](), Counter[int](), Counter[int]()
    for seed in range(draws):
        spec = SampleSpec(SamplingParams(temperature=1.1, top_k=9, seed=seed))
        picked = verify(tokens, [guess], spec).token_ids
        firsts[picked[0]] += 1
        if picked[0] == guess:
            seconds[picked[1]] += 1
        else:
            assert len(picked) == 1
            replacements[picked[0]] += 1
    rest_V = probs_V.clone()
    rest_V[guess] = 0.0
    for counts, expected_V in ((firsts, probs_V), (seconds, second_V), (replacements, rest_V / rest_V.sum())):
        assert abs(chi_square(counts, expected_V)) < 4.5
    assert seconds.total() / draws == pytest.approx(float(probs_V[guess]), abs=0.03)


def filtered(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    probs_C, ids_C = candidates(logits_V, params)
    assert ids_C is not None
    probs_V = torch.zeros(len(logits_V), dtype=torch.float64).scatter(0, ids_C, probs_C.double())
    return probs_V / probs_V.sum()


def test_a_batch_is_its_items() -> None:
    """Greedy, sampled and penalised items with different numbers of drafts, together and alone."""
    random = torch.Generator().manual_seed(8)
    seen = SeenTokens(np.array([5]), [3, 3])
    specs = [
        SampleSpec(SamplingParams(temperature=0.0), logprobs=True, top_logprobs=2),
        SampleSpec(SamplingParams(seed=4)),
        SampleSpec(SamplingParams(temperature=0.0, repetition_penalty=1.5), seen, logprobs=True),
        SampleSpec(SamplingParams(temperature=0.0)),
    ]
    counts = [2, 1, 0, 3]
    items, rows = [], []
    for spec, count in zip(specs, counts, strict=True):
        logits_RV = torch.randn(count + 1, VOCAB, generator=random)
        rows.append(logits_RV)
        drafts = logits_RV[:count].argmax(-1).tolist()
        items.append(item([1], drafts, spec))
    together = choose_tokens(torch.cat(rows), items, PENALTIES)
    alone = [choose_tokens(row, [one], PenaltyTable())[0] for row, one in zip(rows, items, strict=True)]
    assert together == alone
    assert [output.num_proposed for output in together] == counts
    assert together[0].token_ids == tuple(rows[0].argmax(-1).tolist())
    assert together[0].logprobs == tuple(token_logprobs(rows[0], together[0].token_ids, [2, 2, 2]))
    assert len(together[2].logprobs) == 1
    assert len(together[3].token_ids) == 4
    assert together[1].logprobs == together[3].logprobs == ()


def test_without_drafts_it_is_the_sampler() -> None:
    logits_RV = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    specs = [SampleSpec(SamplingParams(temperature=index * 0.4, seed=index)) for index in range(5)]
    outputs = choose_tokens(logits_RV, [item([1], [], spec) for spec in specs], PENALTIES)
    assert [output.token_ids for output in outputs] == [
        (sample_row(logits_V, spec.params, 1, None),) for logits_V, spec in zip(logits_RV, specs, strict=True)
    ]
