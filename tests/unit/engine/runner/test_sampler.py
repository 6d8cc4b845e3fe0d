"""Sampling: right distributions, filters in the right order, and randomness that depends on (seed, position) alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.batch import SampleSpec, SeenTokens
from engine.runner import sampler
from engine.runner.penalties import PenaltyTable
from engine.runner.sampler import (
    allowed_rows,
    argmax_rows,
    candidates,
    edit_logits,
    log_probabilities,
    sample_row,
    token_logprobs,
    uniform,
)
from tests.unit.engine.runner.draw_counts import chi_square

DRAWS = 4000
SEEDS = (1, 2024, 9_999_999_999)


def draw(position: int = 0, **params: object) -> tuple[SamplingParams, int]:
    """The parameters and the position of a pick."""
    return SamplingParams(**params), position  # type: ignore[arg-type]


def sample(logits_RV: torch.Tensor, draws: list[tuple[SamplingParams, int]]) -> list[int]:
    return [
        sample_row(logits_V, params, position, None)
        for logits_V, (params, position) in zip(logits_RV, draws, strict=True)
    ]


def filtered_probs(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The candidates' probabilities at their places in the vocabulary."""
    probs_C, ids_C = candidates(logits_V, params)
    if ids_C is None:
        return probs_C.double()
    return torch.zeros(len(logits_V), dtype=torch.float64).scatter(0, ids_C, probs_C.double())


@pytest.mark.parametrize(
    ("params", "seed"),
    [
        *(({"temperature": 1.0}, seed) for seed in SEEDS),
        ({"temperature": 0.6}, 1),
        ({"temperature": 1.5, "top_k": 5}, 2),
        ({"top_p": 0.8}, 3),
        ({"min_p": 0.1}, 4),
        ({"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05}, 5),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, float], seed: int) -> None:
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(5)) * 1.5
    draws = [draw(position, seed=seed, **params) for position in range(DRAWS)]
    counts = Counter(sample(logits_V.expand(DRAWS, -1), draws))
    probs_V = filtered_probs(logits_V, draws[0][0])
    assert abs(chi_square(counts, probs_V / probs_V.sum())) < 4.5, f"seed {seed}"


def test_uniform_is_uniform_over_positions_and_seeds() -> None:
    for values in (
        [uniform(7, position) for position in range(DRAWS)],
        [uniform(seed, 3) for seed in range(DRAWS)],
    ):
        assert all(0.0 <= value < 1.0 for value in values)
        tenths = Counter(int(value * 10) for value in values)
        assert abs(chi_square(tenths, torch.full((10,), 0.1))) < 4.5


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draws = [draw(10 + row, seed=row, temperature=0.9 + row / 10, top_k=row * 5) for row in range(6)]
    together = sample(logits_RV, draws)
    alone = [sample(logits_RV[row : row + 1], [draws[row]])[0] for row in range(6)]
    backwards = sample(logits_RV.flip(0), draws[::-1])[::-1]
    assert together == alone == backwards
    assert uniform(-1, 5) == uniform(2**64 - 1, 5) != uniform(1, 5)


def test_greedy_fast_path_equals_the_slow_one() -> None:
    logits_RV = torch.randn(5, 40)
    greedy = [draw(temperature=0.0) for _ in range(5)]
    mixed = [*greedy[:4], draw(temperature=0.0, logit_bias={3: 0.0})]
    picks = logits_RV.argmax(-1).tolist()
    assert sample(logits_RV, greedy) == sample(logits_RV, mixed) == argmax_rows(logits_RV) == picks


def test_filters() -> None:
    logits_V = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    kept = {
        "k": (SamplingParams(top_k=2), [0.0, 0.0, 3 / 7, 4 / 7]),
        "p": (SamplingParams(top_p=0.41), [0.0, 0.0, 0.3, 0.4]),
        "p exact": (SamplingParams(top_p=0.39), [0.0, 0.0, 0.0, 0.4]),
        "none left but the first": (SamplingParams(top_p=0.0), [0.0, 0.0, 0.0, 0.4]),
        "min": (SamplingParams(min_p=0.6), [0.0, 0.0, 0.3, 0.4]),
        # top-p looks at what top-k has left: 4/7 < 0.6, so both stay. 0.5 keeps one.
        "k then p": (SamplingParams(top_k=2, top_p=0.6), [0.0, 0.0, 3 / 7, 4 / 7]),
        "k then less p": (SamplingParams(top_k=2, top_p=0.5), [0.0, 0.0, 0.0, 4 / 7]),
    }
    for name, (params, expected) in kept.items():
        got = filtered_probs(logits_V, params)
        torch.testing.assert_close(got, torch.tensor(expected).double(), atol=1e-6, rtol=1e-6, msg=name)


def test_nucleus_equals_a_plain_sort() -> None:
    for scale in (0.01, 1.0, 6.0):
        logits_V = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * scale
        for top_p in (0.1, 0.5, 0.97, 0.999):
            ordered, ids = torch.softmax(logits_V.double(), 0).sort(descending=True)
            expected = int((ordered.cumsum(0) - ordered < top_p).sum())
            kept = filtered_probs(logits_V, SamplingParams(top_p=top_p)) > 0
            assert abs(int(kept.sum()) - expected) <= 1
            assert kept[ids[: expected - 1]].all()


def test_cold_temperatures_are_greedy() -> None:
    logits_V = torch.randn(50) * 1e4
    for temperature in (1e-3, 1e-12, 5e-324):
        assert sample(logits_V[None], [draw(temperature=temperature, seed=4)]) == [int(logits_V.argmax())]


def test_penalties_and_bias() -> None:
    logits_V = torch.tensor([2.0, -2.0, 1.0, 0.5])
    seen = SeenTokens(np.array([1, 1]), [0, 0, 0])
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 4.0}
    )
    edited = edit_logits(logits_V, params, PenaltyTable().of(SampleSpec(params, seen), logits_V))
    torch.testing.assert_close(edited, torch.tensor([2.0 / 2 - 1.5 - 0.25, -4.0, 1.0, 4.5]))
    assert logits_V.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert sample(logits_V[None], [draw(temperature=0.0, logit_bias={2: 9.0})]) == [2]


def test_token_logprobs_are_of_the_raw_distribution() -> None:
    logits_RV = torch.randn(2, 9)
    scored = token_logprobs(logits_RV, [4, 0], [0, 3])
    expected = torch.log_softmax(logits_RV, -1)
    assert scored[0].logprob == pytest.approx(float(expected[0, 4]))
    assert scored[0].top == ()
    assert [token for token, _ in scored[1].top] == expected[1].topk(3).indices.tolist()
    assert token_logprobs(logits_RV, [4, 0], [99, 0])[0].top[-1][0] == int(logits_RV[0].argmin())


def test_of_equally_likely_tokens_the_first_are_told_whatever_others_ask_for() -> None:
    """Wide ties: many tokens of a vocabulary may have the same weights. Before, more entries for one row changed which
    tokens another row was told."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randint(-20, 4, (6, 5000), generator=generator).float()
    logits_RV[5] = torch.tensor([-math.inf, 0.0]).repeat(2500)
    for most in (5, 20, 200):
        tokens = [0] * 6
        for row, scored in enumerate(token_logprobs(logits_RV, tokens, [5, 4, 3, 2, 1, most])):
            order = sorted(range(5000), key=lambda token: (-logits_RV[row, token].item(), token))
            assert [token for token, _ in scored.top] == order[: len(scored.top)]
            expected_V = logits_RV[row].log_softmax(0)
            assert all(value == expected_V[token].item() for token, value in scored.top)


def test_top_k_keeps_the_order_of_tokens_and_all_equals_of_the_last() -> None:
    """The kernel on a GPU does so as well, and either may sample a request from one step to the next."""
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.0, 2.0])
    probs, ids = candidates(logits, SamplingParams(top_k=2))
    assert ids is not None
    assert ids.tolist() == [1, 2, 4, 5]
    assert torch.equal(probs, torch.softmax(logits[[1, 2, 4, 5]], 0))


def test_masks_leave_only_what_is_allowed() -> None:
    """The reference reads the mask bit by bit. The vocabulary ends within a byte."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randn((4, 21), generator=generator)
    before_RV = logits_RV.clone()
    masks = {3: bytes([0b00000110, 0, 0b11110001]), 1: bytes([0, 0b10000000, 0])}
    masked_RV = allowed_rows(logits_RV, masks)
    for row in range(4):
        for token in range(21):
            kept = row not in masks or masks[row][token // 8] >> token % 8 & 1
            assert masked_RV[row, token] == (before_RV[row, token] if kept else float("-inf"))
    assert torch.equal(logits_RV, before_RV)
    assert allowed_rows(logits_RV, {}) is logits_RV


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0.0, repetition_penalty=5.0, frequency_penalty=2.0, logit_bias={0: 100.0}),
        SamplingParams(temperature=1.0, repetition_penalty=0.1, logit_bias={0: 100.0}),
    ],
    ids=["greedy", "warm", "filtered", "edited", "edited and warm"],
)
def test_only_allowed_tokens_are_picked_however_that_is_done(params: SamplingParams) -> None:
    logits_RV = torch.randn((1, 40), generator=torch.Generator().manual_seed(7)) * 10
    likely = set(logits_RV[0].topk(20).indices.tolist())
    allowed = sorted(set(range(40)) - likely)[:3]  # unlikely tokens
    mask = sum(1 << token for token in allowed).to_bytes(5, "little")
    seen = SeenTokens(np.array(allowed), [allowed[0]] * 2)
    masked_V = allowed_rows(logits_RV, {0: mask})[0]
    penalties = PenaltyTable().of(SampleSpec(params, seen), masked_V)
    picks = {sample_row(masked_V, params, position, penalties) for position in range(200)}
    assert picks <= set(allowed)


@pytest.mark.parametrize("vocab", [24, 1025, 1026, 1027, 1028])
def test_rows_that_are_aligned_have_the_same_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    logits_RV = torch.randn(5, vocab).bfloat16()
    monkeypatch.setattr(sampler, "is_gpu", lambda _device: True)
    expected_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    torch.testing.assert_close(log_probabilities(logits_RV), expected_RV, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("vocab", [24, 1501, 32_001, 128_257])
def test_a_row_has_the_same_bits_at_every_place(vocab: int) -> None:
    """torch deals the numbers of a row to threads by the row's address: rows of 32,001 numbers differed."""
    row_V = torch.randn(vocab, device="cuda")
    scores_RV = log_probabilities(row_V.expand(9, vocab).contiguous())
    assert all(torch.equal(each_V, scores_RV[0]) for each_V in scores_RV)
    assert torch.equal(log_probabilities(row_V[None])[0], scores_RV[0])
