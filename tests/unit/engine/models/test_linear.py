"""Every implementation of a product gives what torch's own linear gives. Halving is exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.models.half_linear import (
    HalfKernels,
    HalfWeights,
    QuickHalfLinear,
    ThreadedHalfLinear,
    find_half_kernels,
    halve_exactly,
)
from engine.models.linear import (
    CastingLinear,
    Linear,
    OneDnnLinear,
    PlainLinear,
    SlicedLinear,
    SplitLinear,
    TransposedLinear,
    bfloat16_linear,
    float32_linear,
    has_onednn,
    linear_factory,
)

SHAPES = [(48, 32), (33, 65), (1, 7), (512, 256), (1030, 520)]
HALF = find_half_kernels()


def halved(
    kind: type[QuickHalfLinear] | type[ThreadedHalfLinear], weight: Tensor, bias: Tensor | None
) -> Linear:
    half = halve_exactly(weight)
    assert half is not None
    return kind(half, bias)


WAYS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {"transposed": TransposedLinear}
if has_onednn():
    WAYS["onednn"] = partial(OneDnnLinear, packed=False)
    WAYS["onednn packed"] = partial(OneDnnLinear, packed=True)
if HALF.threaded:
    WAYS["half threaded"] = partial(halved, ThreadedHalfLinear)
if HALF.quick:
    WAYS["half quick"] = partial(halved, QuickHalfLinear)
if has_onednn():
    WAYS["chosen"] = partial(float32_linear, kernels=HALF)
WAYS["sliced"] = lambda weight, bias: SplitLinear(SlicedLinear(weight, bias), PlainLinear(weight, bias), 1)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_equals_the_reference(way: str, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(3)
    weight_OI = (torch.randn(shape) * 0.05).bfloat16().float()
    bias_O = torch.randn(shape[0]) if biased else None
    with torch.inference_mode():
        linear, reference = WAYS[way](weight_OI, bias_O), PlainLinear(weight_OI, bias_O)
        for rows in (1, 2, 8, 9, 70):
            x_NI = torch.randn(rows, shape[1])
            torch.testing.assert_close(linear(x_NI), reference(x_NI), atol=3e-6, rtol=1e-5)


def test_bfloat16_weights_give_float32_rows() -> None:
    weight_OI = torch.randn(64, 32).bfloat16()
    bias_O = torch.randn(64).bfloat16()
    old_cpu = partial(bfloat16_linear, kernels=HALF, packs=False)
    bare = partial(bfloat16_linear, kernels=HalfKernels(threaded=False, quick=False), packs=False)
    for make in (CastingLinear, linear_factory(torch.bfloat16), old_cpu, bare):
        for rows in (1, 3, 20):
            x_NI = torch.randn(rows, 32)
            expected = x_NI.bfloat16().float() @ weight_OI.float().t() + bias_O.float()
            got = make(weight_OI, bias_O)(x_NI)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected, atol=0.2, rtol=0.02)


def test_bfloat16_values_are_halved_without_loss() -> None:
    torch.manual_seed(5)
    tiny = torch.tensor([[1e-9, -3e-8, 2.5e-6, 0.0]]).bfloat16().float()
    for weight in (tiny, torch.randn(200, 100).bfloat16().float() * 2.0**-5, torch.zeros(3, 3), tiny * 2**40):
        half = halve_exactly(weight)
        assert half is not None
        stored = half.scaled_OI.half()
        assert torch.equal(stored.double() / half.scale, weight.double())


def test_what_float16_cannot_hold_is_refused() -> None:
    for weight in (
        torch.randn(4, 4),
        torch.tensor([[1.0, 1e-12]]).bfloat16().float(),
        torch.tensor([[float("inf")]]),
    ):
        assert halve_exactly(weight) is None
    fallback = float32_linear(torch.randn(4, 4), None, HALF)
    assert fallback(torch.randn(1, 4)).shape == (1, 4)


def test_half_kernels_see_subnormals() -> None:
    """The smallest weights are float16 subnormals. A kernel that flushed them to zero would lose them."""
    if not HALF.threaded:
        pytest.skip("no FBGEMM here")
    half = HalfWeights(torch.tensor([[2.0**-24, 2.0**15]]), 1.0)
    for kind in (ThreadedHalfLinear, QuickHalfLinear) if HALF.quick else (ThreadedHalfLinear,):
        assert kind(half, None)(torch.tensor([[1.0, 0.0]])).item() == 2.0**-24
