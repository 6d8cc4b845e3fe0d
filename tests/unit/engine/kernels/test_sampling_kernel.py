"""The sampling kernels against the sampler of engine/runner/sampler.py, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.api import SamplingParams
from engine.kernels.sampling import GROUP, TILE, pick_tokens
from engine.runner.sample_table import SampleTable
from engine.runner.sampler import candidates, sample_row, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HELD = GROUP * TILE
"""If more tokens than this stay, the kernel holds only a part of them in registers."""
CLOSE = 1e-5
TIMES = 20 if DEVICE.type == "cuda" else 1
"""A card has time for more rows than the interpreter."""


def table_of(params: list[SamplingParams], points: list[float], wide_points: bool = True) -> SampleTable:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return SampleTable(
        column([one.temperature for one in params], torch.float32),
        column([one.top_k for one in params], torch.int32),
        column([one.top_p for one in params], torch.float32),
        column([one.min_p for one in params], torch.float32),
        column(points, torch.float64 if wide_points else torch.float32),
    )


def picks(
    logits_RV: Tensor, params: list[SamplingParams], points: list[float], wide_points: bool = True
) -> list[int]:
    out_R = torch.full((len(params),), -99, device=DEVICE)
    pick_tokens(logits_RV.to(DEVICE), table_of(params, points, wide_points), out_R)
    return out_R.tolist()


def shares(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that the kernel draws from, by token id, float64 [V]."""
    masses_C, ids_C = candidates(logits_V.float(), params)
    dense_V = torch.zeros(len(logits_V), dtype=torch.float64)
    dense_V[torch.arange(len(logits_V)) if ids_C is None else ids_C] = masses_C.double()
    return dense_V / dense_V.sum()


def agrees(logits_V: Tensor, params: SamplingParams, point: float, token: int) -> bool:
    """Whether `token` is the pick, or would be the pick if the point or the edge of the nucleus lay slightly elsewhere.

    The point may be off by CLOSE. The edge may be off by a rounding error of float32, which can move it by a token.
    """
    if params.greedy:
        return token == int(logits_V.float().argmax())
    edges = (0.0, 2e-6, -2e-6) if params.top_p < 1.0 else (0.0,)
    for edge in edges:
        near = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(max(params.top_p + edge, 1e-9), 1.0),
            min_p=params.min_p,
        )
        shares_V = shares(logits_V, near)
        upto = float(shares_V[: token + 1].sum())
        share = float(shares_V[token])
        if share > 0.0 and upto - share - CLOSE <= point <= upto + CLOSE:
            return True
    return False


def check(logits_RV: Tensor, params: list[SamplingParams], points: list[float]) -> None:
    for row, token in enumerate(picks(logits_RV, params, points)):
        assert agrees(logits_RV[row].cpu(), params[row], points[row], token), (row, token, params[row])


def some_params(random: torch.Generator, vocab_size: int) -> SamplingParams:
    def draw(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), (1,), generator=random))]

    return SamplingParams(
        temperature=draw(0.0, 0.3, 0.7, 1.0, 1.0, 2.5),
        top_k=int(draw(0, 0, 1, 2, 20, 50, 200, vocab_size - 1, vocab_size, vocab_size + 5)),
        top_p=draw(1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999),
        min_p=draw(0.0, 0.0, 0.0, 0.05, 0.3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(1, 2), (17, 6), (64, 4), (1000, 12), (HELD, 2), (HELD + 77, 6)]
)
def test_any_parameters(vocab_size: int, rows: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    rows *= TIMES
    spread_R1 = torch.rand((rows, 1), generator=random) * 6
    logits_RV = (torch.randn((rows, vocab_size), generator=random) * spread_R1).to(dtype)
    params = [some_params(random, vocab_size) for _ in range(rows)]
    if dtype != torch.float32:
        # The sampler may keep any of the tokens that equal the k-th. test_equals_of_the_kth_stay has the kernel's rule.
        params = [
            SamplingParams(temperature=one.temperature, top_p=one.top_p, min_p=one.min_p) for one in params
        ]
    check(logits_RV, params, torch.rand(rows, generator=random, dtype=torch.float64).tolist())


def test_same_tokens_as_the_sampler() -> None:
    """The rows use the numbers that requests draw, over many seeds. One in a hundred may lie on an edge of float32."""
    random = torch.Generator().manual_seed(11)
    rows, vocab_size = 80 * TIMES, 333
    logits_RV = torch.randn((rows, vocab_size), generator=random) * 3
    params = [SamplingParams(temperature=(0.0, 0.6, 1.0, 1.4)[row % 4], seed=row) for row in range(rows)]
    params += [SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=row) for row in range(20)]
    logits_RV = torch.cat([logits_RV, logits_RV[:20]])
    points = [uniform(one.seed, 5 + row) for row, one in enumerate(params)]
    expected = [sample_row(logits_RV[row], one, 5 + row, None) for row, one in enumerate(params)]
    got = picks(logits_RV, params, points)
    differing = [row for row in range(len(got)) if got[row] != expected[row]]
    assert len(differing) <= len(got) // 100
    assert all(agrees(logits_RV[row], params[row], points[row], got[row]) for row in differing)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.8)])
def test_points_divide_the_row_by_shares(params: SamplingParams) -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(3))
    points = [(index + 0.5) / 16 for index in range(16)]
    tokens = picks(logits_V.expand(16, 40).contiguous(), [params] * 16, points)
    assert tokens == sorted(tokens)
    counts_V = torch.bincount(torch.tensor(tokens), minlength=40)
    assert float((counts_V / 16 - shares(logits_V, params)).abs().max()) <= 1 / 16 + CLOSE


@pytest.mark.parametrize("spread", [0.05, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=700),
        SamplingParams(top_k=3000, top_p=0.7, min_p=0.01),
        SamplingParams(min_p=0.001, top_p=0.97),
        SamplingParams(min_p=0.01),
        SamplingParams(temperature=30.0, top_p=0.5),
    ],
)
def test_wide_nuclei_and_large_k(params: SamplingParams, spread: float) -> None:
    """More tokens stay than the kernel holds in registers."""
    random = torch.Generator().manual_seed(7)
    logits_RV = torch.randn((2, HELD + 1000), generator=random) * spread
    assert int((shares(logits_RV[0], params) > 0).sum()) > GROUP
    check(logits_RV, [params] * 2, [0.31, 0.9999])


def test_equals_of_the_kth_stay() -> None:
    logits_V = torch.full((100,), -1.0)
    logits_V[[7, 30, 31, 90]] = 2.0
    logits_V[50] = 3.0
    points = [(index + 0.5) / 12 for index in range(12)]
    params = [SamplingParams(top_k=3)] * 12
    assert set(picks(logits_V.expand(12, 100).contiguous(), params, points)) == {7, 30, 31, 50, 90}


def test_equals_are_one_to_the_nucleus_and_the_first_of_them_to_greedy() -> None:
    for vocab_size in (200, HELD + 200):
        logits_RV = torch.zeros(6, vocab_size)
        logits_RV[1, [150, 160]] = 40.0
        params = [SamplingParams(temperature=0.0)] * 2
        params += [SamplingParams(top_p=0.01), SamplingParams(top_k=1), SamplingParams(min_p=1.0)]
        points = [0.5, 0.5, 0.25, 0.5, 0.75]
        expected = [0, 150, vocab_size // 4, vocab_size // 2, 3 * vocab_size // 4]
        assert picks(logits_RV[:5], params, points) == expected


def test_the_most_likely_when_nothing_else_stays() -> None:
    random = torch.Generator().manual_seed(2)
    logits_RV = torch.randn((7, 500), generator=random) * 4
    logits_RV[6] = -torch.inf
    logits_RV[6, 123] = -5.0
    params = [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1e-5, top_k=7, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.9),
        SamplingParams(temperature=2.0),
    ]
    assert picks(logits_RV, params, [0.999] * 7) == logits_RV.argmax(-1).tolist()


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("vocab_size", [90, HELD + 90])
def test_what_cannot_be_picked_is_not(fill: float, vocab_size: int) -> None:
    logits_RV = torch.full((6, vocab_size), fill)
    logits_RV[:, 17], logits_RV[:, 63], logits_RV[:, 64], logits_RV[:, 80] = 1.0, 1.0, 1.0, 1.0
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=60),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.5),
        SamplingParams(temperature=1e30, top_k=3, top_p=0.99, min_p=0.2),
    ]
    assert picks(logits_RV, params, [0.0, 0.3, 0.6, 0.9, 0.99, 0.0]) == [17, 63, 64, 80, 80, 17]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_no_numbers_end_at_the_first_token(value: float) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3, top_p=0.5, min_p=0.1),
        SamplingParams(),
    ]
    assert picks(torch.full((3, HELD + 1), value), params, [0.0] * 3) == [0, 0, 0]


def test_rows_do_not_see_each_other_or_what_lies_between_them() -> None:
    random = torch.Generator().manual_seed(23)
    wide_RW = torch.full((5, 1100), 1e9)
    wide_RW[:, :1001] = torch.randn((5, 1001), generator=random) * 2
    logits_RV = wide_RW.to(DEVICE)[:, :1001]
    params = [some_params(random, 1001) for _ in range(5)]
    points = [0.11, 0.37, 0.52, 0.78, 0.93]
    together = picks(logits_RV, params, points)
    check(logits_RV, params, points)
    for row in range(5):
        assert picks(logits_RV[row : row + 1], params[row : row + 1], points[row : row + 1]) == [
            together[row]
        ]


def test_points_may_be_float32() -> None:
    logits_RV = torch.randn((8, 100), generator=torch.Generator().manual_seed(1))
    points = [index / 8 for index in range(8)]
    params = [SamplingParams(min_p=0.01)] * 4 + [SamplingParams()] * 4
    assert picks(logits_RV, params, points, wide_points=False) == picks(logits_RV, params, points)


def test_rows_must_be_dense() -> None:
    with pytest.raises(ValueError, match="dense"):
        picks(torch.zeros(4, 6).T, [SamplingParams()] * 6, [0.0] * 6)
