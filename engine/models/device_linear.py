"""Which products a device runs, and why: on a CPU those of engine/models/linear.py or compiled kernels, on a GPU the
quickest, or the quickest of those that sum in one order.

With several ranks, each times its own shares on its own GPU: what they compute separately need not be rounded alike.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.cpu.library import NoKernels, Workers, find_kernels
from engine.cpu.matrix import PackedLinears
from engine.device import activation_dtype, is_gpu, seconds_of_each
from engine.kernels.choose import triton_trouble
from engine.models.errors import UnsupportedModel
from engine.models.linear import (
    ActivatedLinear,
    CastingLinear,
    Linear,
    LinearFactory,
    PlainLinear,
    linear_factory,
)
from engine.models.measured_linear import BETTER, EARLY_BETTER, TORCH, MeasuredGated, MeasuredLinears
from engine.settings import LinearName


@runtime_checkable
class Linears(Protocol):
    """Makes a model's products, and reports what it made."""

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None, /) -> Linear: ...

    def describe(self) -> Mapping[str, str]:
        """Call it once all products are made."""


class FixedLinears:
    """The same kind for every matrix."""

    def __init__(self, make: LinearFactory, about: Mapping[str, str]) -> None:
        self._make = make
        self._about = dict(about)

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._make(weight_OI, bias_O)

    def describe(self) -> Mapping[str, str]:
        return self._about


def choose_linears(
    name: LinearName, device: torch.device, weights: torch.dtype, *, deterministic: bool = False
) -> Linears:
    """auto is the quickest kind for the device and the dtype of weights, torch is torch's own. With `deterministic` a
    row's results do not depend on the number of rows; raises UnsupportedModel where there is no such kind."""
    if deterministic:
        if name == "torch":
            raise UnsupportedModel("execution.deterministic: torch's products depend on the number of rows")
        return _ordered(device) if is_gpu(device) else _packed_exactly()
    own = PlainLinear if weights == activation_dtype(device, weights) else CastingLinear
    if name == "torch":
        return FixedLinears(own, _torch("it was asked for"))
    if not is_gpu(device):
        return _on_cpu(weights)
    if weights not in (torch.bfloat16, torch.float16):
        return FixedLinears(own, _torch(f"there is no other for weights in {weights}"))
    try:
        return _measured(device)
    except ModuleNotFoundError as error:
        return FixedLinears(own, _torch(f"{error.name} is not installed"))


def _measured(device: torch.device) -> Linears:
    """Raises ModuleNotFoundError without Triton."""
    from engine.kernels.early_launch import early_options
    from engine.kernels.few_rows import TILES, FewRowsLinear

    measured = partial(
        MeasuredLinears,
        timer=partial(seconds_of_each, device),
        better=EARLY_BETTER if early_options(device)["EARLY"] else BETTER,
    )
    ways: dict[str, LinearFactory] = {TORCH: PlainLinear}
    ways |= {f"few{tiles.block_o}": partial(FewRowsLinear, tiles=tiles) for tiles in TILES}
    if triton_trouble(device) is not None:
        return measured(ways)
    return MeasuredGated(measured(ways), measured(_gated_ways(ways)))


def _gated_ways(ways: Mapping[str, LinearFactory]) -> dict[str, LinearFactory]:
    """Each of the products with the activation behind it, and both in one kernel."""
    from engine.kernels.gated_rows import GATED_TILES, GatedFewRows
    from engine.kernels.silu_mul import silu_mul

    def activated(make: LinearFactory, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return ActivatedLinear(make(weight_OI, bias_O), silu_mul)

    gated: dict[str, LinearFactory] = {name: partial(activated, make) for name, make in ways.items()}
    gated |= {f"gated{tiles.block_o}": partial(GatedFewRows, tiles=tiles) for tiles in GATED_TILES}
    return gated


def _on_cpu(weights: torch.dtype) -> Linears:
    """The compiled kernels where the project was installed with a compiler, else the best of torch's operators."""
    kernels = find_kernels()
    if isinstance(kernels, NoKernels):
        return FixedLinears(linear_factory(weights), _torch(kernels.reason))
    workers = Workers(kernels, torch.get_num_threads())
    return PackedLinears(workers, rounds=weights == torch.bfloat16)


def _ordered(device: torch.device) -> Linears:
    trouble = triton_trouble(device)
    if trouble is not None:
        raise UnsupportedModel(f"execution.deterministic needs Triton's kernels: {trouble}")
    from engine.models.ordered_linear import OrderedLinears

    return OrderedLinears(partial(seconds_of_each, device))


def _packed_exactly() -> Linears:
    """The compiled kernels: they sum in the order of inputs. Rows are not rounded, since few of them would not be."""
    kernels = find_kernels()
    if isinstance(kernels, NoKernels):
        raise UnsupportedModel(f"execution.deterministic needs the compiled kernels: {kernels.reason}")
    return PackedLinears(Workers(kernels, torch.get_num_threads()), rounds=False)


def _torch(reason: str) -> dict[str, str]:
    return {"linear": TORCH, "linear_reason": reason}
