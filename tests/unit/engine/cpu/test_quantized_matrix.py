"""Products with matrices that stay in fp8, fp4 or integers have the bits of those that were multiplied out, in every
build that runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.cpu.library import Workers
from engine.cpu.matrix import PackedLinears, PackedMatrix
from engine.models.quantized_matrix import FP4, FP8, QuantizedMatrix
from tests.unit.engine.cpu.builds import every_build, every_build_and, kernels_of

SHAPES = [(48, 32), (34, 66), (2, 6), (1030, 520)]
COLUMNS = (2, 8, 26, 10_000)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 25, 70, 400)


def integers(bits: int) -> Callable[[int, int, int], QuantizedMatrix]:
    def make(outputs: int, inputs: int, columns: int) -> QuantizedMatrix:
        blocks = -(-inputs // columns)
        return QuantizedMatrix(
            torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
            torch.rand(outputs, blocks) * 0.02 - 0.01,
            columns,
            torch.randint(0, 2**bits, (outputs, blocks), dtype=torch.uint8),
            bits,
        )

    return make


def fp8(outputs: int, inputs: int, columns: int) -> QuantizedMatrix:
    values_OI = (torch.randn(outputs, inputs) * torch.rand(outputs, 1) * 100).to(FP8)
    return QuantizedMatrix(values_OI, torch.rand(outputs, -(-inputs // columns)) * 0.001, columns)


def fp4(outputs: int, inputs: int, columns: int) -> QuantizedMatrix:
    exponents_OB = torch.randint(-14, -3, (outputs, -(-inputs // columns))).float()
    pairs = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return QuantizedMatrix(pairs.view(FP4), torch.exp2(exponents_OB), columns)


KINDS = {"int4": integers(4), "int8": integers(8), "fp8": fp8, "fp4": fp4}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
@every_build_and(1, 3)
def test_the_bits_are_those_of_the_matrix_that_was_multiplied_out(
    variant: str, kind: str, columns: int, threads: int
) -> None:
    torch.manual_seed(6)
    linears = PackedLinears(Workers(kernels_of(variant), threads), rounds=False)
    for outputs, inputs in SHAPES:
        matrix = KINDS[kind](outputs, inputs, columns)
        assert linears.keeps(matrix)
        wide_OI, bias_O = matrix.multiplied(torch.float32), torch.randn(outputs)
        for make in (linears, linears.gated):
            found, expected = make(matrix, bias_O), make(wide_OI, bias_O)
            for rows in ROWS:
                x_NI = torch.randn(rows, inputs)
                assert torch.equal(found(x_NI), expected(x_NI)), (outputs, inputs, rows)


@pytest.mark.parametrize("kind", KINDS)
@every_build
def test_many_rows_are_rounded_with_the_weights(variant: str, kind: str) -> None:
    """Few rows are multiplied with weights that are not rounded."""
    torch.manual_seed(7)
    workers = Workers(kernels_of(variant), 2)
    matrix, bias_O = KINDS[kind](80, 96, 32), torch.randn(80)
    found = PackedLinears(workers, rounds=True)(matrix, bias_O)
    exact = PackedLinears(workers, rounds=False)(matrix, bias_O)
    rounded = PackedLinears(workers, rounds=True)(matrix.multiplied(torch.bfloat16), bias_O)
    for rows in (1, 4, 5, 16, 17, 33, 70):
        x_NI = torch.randn(rows, 96)
        rounds = rows > 4 and variant in ("amx", "avx512bf16")
        assert torch.equal(found(x_NI), (rounded if rounds else exact)(x_NI)), rows


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@every_build
def test_every_number_is_what_torch_makes_of_it(variant: str, kind: str) -> None:
    """Each is a row's only weight, by one input that is one."""
    bits = 4 if kind == "int4" else 8
    values_O1 = torch.arange(2**bits, dtype=torch.uint8)[:, None]
    if kind == "fp8":
        values_O1 = values_O1[~values_O1.view(FP8).float().isnan()][:, None].view(FP8)
    count = len(values_O1)
    values_OI = torch.zeros(count, 2, dtype=torch.uint8)
    values_OI[:, :1] = values_O1.view(torch.uint8)
    zeros_OB = None if kind == "fp8" else torch.arange(count).flip(0)[:, None].to(torch.uint8)
    scales_OB = torch.linspace(0.3, 3, count)[:, None]
    matrix = QuantizedMatrix(values_OI.view(values_O1.dtype), scales_OB, 2, zeros_OB, bits)
    linears = PackedLinears(Workers(kernels_of(variant), 1), rounds=False)
    for rows in (1, 40):
        x_NI = torch.tensor([[1.0, 0.0]]).repeat(rows, 1)
        assert torch.equal(
            linears(matrix, None)(x_NI), matrix.multiplied(torch.float32)[:, 0].expand(rows, -1)
        )


@every_build
def test_every_pair_of_fp4_is_what_is_meant(variant: str) -> None:
    """With every scale. Each input picks one of the two."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = torch.tensor(numbers + [-number for number in numbers])
    pairs = torch.arange(256)
    scales_OB = torch.exp2(torch.linspace(-126, 125, 256).round())[:, None]
    matrix = QuantizedMatrix(pairs[:, None].to(torch.uint8).view(FP4), scales_OB, 2)
    meant_OI = torch.stack([numbers[pairs % 16], numbers[pairs // 16]], 1) * scales_OB
    assert torch.equal(matrix.multiplied(torch.float32), meant_OI)
    linears = PackedLinears(Workers(kernels_of(variant), 1), rounds=False)
    for rows in (2, 40):
        assert torch.equal(
            linears(matrix, None)(torch.eye(2).repeat(rows // 2, 1)), meant_OI.t().repeat(rows // 2, 1)
        )


@pytest.mark.parametrize(("kind", "most"), [("int4", 0.6), ("int8", 1.1), ("fp8", 1.1), ("fp4", 0.51)])
@every_build
def test_memory_is_that_of_the_checkpoint(variant: str, kind: str, most: float) -> None:
    """`most` bytes a weight, with scales and zeros of groups of 128."""
    linears = PackedLinears(Workers(kernels_of(variant), 1), rounds=False)
    linear = linears(KINDS[kind](64, 1024, 128), None)
    assert isinstance(linear, PackedMatrix)
    assert linears.workers.kernels.c.kedge_packed_bytes(linear.matrix) < most * 64 * 1024
    assert linears.describe()["quantized"] == f"1 matrices of {kind}"


@every_build
def test_what_the_kernels_do_not_take_is_not_kept(variant: str) -> None:
    linears = PackedLinears(Workers(kernels_of(variant), 1), rounds=False)
    assert not linears.keeps(fp8(4, 33, 33)), "inputs come in twos"
    assert not linears.keeps(fp8(4, 32, 5)), "so do those of a group"
    not_a_number = fp8(4, 32, 32)
    not_a_number.values_OI.view(torch.uint8)[1, 2] = 0x7F
    assert not linears.keeps(not_a_number)
    for scale in (2.0**-127, torch.inf):
        beyond = fp4(4, 32, 32)
        beyond.scales_OB[2] = scale
        assert not linears.keeps(beyond), "its exponent is that of no normal number"
    assert "quantized" not in linears.describe()
