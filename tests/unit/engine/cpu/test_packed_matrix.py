"""Products with packed weights equal those of torch's own linear, in every build that runs here."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from engine.cpu.library import Workers
from engine.cpu.matrix import ALIGNMENT, BLOCK, PackedLinears, PackedMatrix, WeightMemory, narrowed
from engine.models.clamped_swiglu import ClampedSwiglu
from engine.models.linear import PlainLinear
from tests.unit.engine.cpu.builds import every_build, every_build_and, kernels_of

SHAPES = [(48, 32), (34, 65), (2, 7), (512, 256), (1030, 520)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 70, 400)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("values", DTYPES, ids=str)
@every_build_and(1, 3)
def test_equals_the_reference(variant: str, values: torch.dtype, biased: bool, threads: int) -> None:
    """`values` is the dtype that could hold the weights."""
    torch.manual_seed(3)
    linears = PackedLinears(Workers(kernels_of(variant), threads), rounds=False)
    for shape in SHAPES:
        weight_OI = (torch.randn(shape) * 0.05).to(values).float()
        assert narrowed(weight_OI).dtype == values
        bias_O = torch.randn(shape[0]) if biased else None
        linear, reference = linears(weight_OI, bias_O), PlainLinear(weight_OI, bias_O)
        gated, clamp = linears.gated(weight_OI, bias_O), ClampedSwiglu(1.7, 0.2)
        clamped = linears.clamped(weight_OI, torch.zeros(shape[0]) if bias_O is None else bias_O, clamp)
        for rows in ROWS:
            x_NI = torch.randn(rows, shape[1])
            expected_NO = reference(x_NI)
            torch.testing.assert_close(linear(x_NI), expected_NO, atol=6e-6, rtol=1e-5)
            gate_NO, up_NO = expected_NO.chunk(2, -1)
            torch.testing.assert_close(gated(x_NI), silu(gate_NO) * up_NO, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(clamped(x_NI), clamp(expected_NO), atol=1e-5, rtol=1e-5)
        assert clamped(torch.full((7, shape[1]), torch.nan)).isnan().all(), "the clamp hides nothing"


@pytest.mark.parametrize("values", DTYPES, ids=str)
@every_build
def test_a_row_has_the_same_bits_beside_any_number_of_others(variant: str, values: torch.dtype) -> None:
    torch.manual_seed(5)
    for outputs, inputs in SHAPES:
        weight_OI, x_NI = (torch.randn(outputs, inputs) * 0.05).to(values).float(), torch.randn(400, inputs)
        made = [
            make(weight_OI, torch.ones(outputs))
            for linears in (PackedLinears(Workers(kernels_of(variant), n), rounds=False) for n in (1, 3))
            for make in (linears, linears.gated)
        ]
        expected = [linear(x_NI) for linear in made]
        assert torch.equal(expected[0], expected[2])
        assert torch.equal(expected[1], expected[3])
        for rows in ROWS:
            for linear, all_NO in zip(made, expected, strict=True):
                assert torch.equal(linear(x_NI[-rows:]), all_NO[-rows:]), f"{rows} rows"


def test_matrices_share_mappings_and_never_overlap() -> None:
    memory, sizes = WeightMemory(), [1, 64, 100, BLOCK // 2, BLOCK // 2, BLOCK + 1, 7]
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % ALIGNMENT == 0
        assert not piece[:: 2**20].any(), "zeroed"
        piece[0], piece[-1] = number, number
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), 1):
        assert len(piece) >= size
        assert (int(piece[0]), int(piece[-1])) == (number, number)
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 4


@pytest.mark.parametrize("inputs", [67, 96])
@every_build
def test_many_rows_may_be_rounded_to_bfloat16(variant: str, inputs: int) -> None:
    torch.manual_seed(4)
    weight_OI, bias_O = torch.randn(96, inputs).bfloat16(), torch.randn(96).bfloat16()
    linear = PackedLinears(Workers(kernels_of(variant), 2), rounds=True)(weight_OI, bias_O)
    exact = PlainLinear(weight_OI.float(), bias_O.float())
    for rows in (1, 4, 9, 16, 17, 32, 40, 75):
        x_NI = torch.randn(rows, inputs)
        got_NO = linear(x_NI)
        assert got_NO.dtype == torch.float32
        apart = [float((got_NO - exact(each)).abs().max()) for each in (x_NI, x_NI.bfloat16().float())]
        assert min(apart) < 1e-4
        assert rows > 4 or apart[0] < 1e-4, "few rows are exact"


@every_build
def test_rows_that_are_not_dense(variant: str) -> None:
    weight_OI = torch.randn(40, 24)
    linear = PackedMatrix(weight_OI, None, Workers(kernels_of(variant), 1), WeightMemory(), rounds=False)
    x_NI = torch.randn(24, 6).t()
    torch.testing.assert_close(linear(x_NI), x_NI @ weight_OI.t(), atol=3e-6, rtol=1e-5)


def test_weights_are_narrowed_only_without_loss() -> None:
    assert narrowed(torch.tensor([[1.0, 1e-12]])).dtype == torch.float32
    assert narrowed(torch.tensor([[1.0, 1.5]])).dtype == torch.bfloat16
    assert narrowed(torch.tensor([[1.0, 1.0 + 2.0**-10]])).dtype == torch.float16
    assert narrowed(torch.tensor([[float("nan")]])).dtype == torch.float32
