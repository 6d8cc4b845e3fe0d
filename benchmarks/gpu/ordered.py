"""Products in one order (`execution.deterministic`) beside those that are chosen freely, for a few rows and for many.

Shapes are those of an 8 B-parameter Llama. Weights rotate over more memory than the L2 cache has. A product of few rows
must have the bits that the same rows have among many.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention_scene import WrongResult
from benchmarks.gpu.products import DRY_SHAPES, ROTATED_BYTES, SHAPES
from benchmarks.gpu.stage import Stage, Timing, time_device
from engine.kernels.ordered_product import OrderedTiles
from engine.kernels.silu_mul import silu_mul
from engine.models.device_linear import choose_linears
from engine.models.linear import ActivatedLinear, GatedLinears, Linear, LinearFactory, PlainLinear
from engine.models.ordered_linear import OrderedLinear

ROWS = (1, 8, 64, 256, 2048)
DRY_ROWS = (1, 8)
DRY_TILES = OrderedTiles(16, 16, 16, 1, 2)
GATE = "gate + up"
"""The MLP's first two matrices, whose activation belongs to the product."""


def run(stage: Stage) -> None:
    for name, (outputs, inputs) in (DRY_SHAPES if stage.dry else SHAPES).items():
        title = f"product {outputs:,} × {inputs:,} ({name})"
        if stage.wants(title):
            stage.attempt(title, partial(report, stage, title, outputs, inputs, gated=name == GATE))


def report(stage: Stage, title: str, outputs: int, inputs: int, *, gated: bool) -> None:
    """Raises WrongResult if the number of rows changes a bit."""
    rows = DRY_ROWS if stage.dry else ROWS
    count = 2 if stage.dry else max(2, -(-ROTATED_BYTES // (outputs * inputs * 2)))
    weights = [0.02 * _draw(stage, (outputs, inputs), 31 + index) for index in range(count)]
    x_NI = _draw(stage, (rows[-1], inputs), 30)
    free, ordered = _ways(stage)
    ways = [[_made(make, weight_OI, gated=gated) for weight_OI in weights] for make in (free, ordered)]
    all_NO = ways[1][0](x_NI)
    for each in rows:
        if not torch.equal(ways[1][0](x_NI[:each]), all_NO[:each]) and not stage.dry:
            raise WrongResult(f"{each} rows have other bits than among {rows[-1]}")
        of_free, of_ordered = (_time(stage, way, x_NI[:each]) for way in ways)
        stage.row(
            f"{title} in one order, {each:,} row{'s' * (each > 1)}", of_ordered.median_s * 1e6, "us",
            limit=of_free.median_s * 1e6, share=of_free.median_s / of_ordered.median_s,
            note=f"the bits of {rows[-1]:,} rows; the limit is the quickest in any order",
        )  # fmt: skip


def _ways(stage: Stage) -> tuple[LinearFactory, LinearFactory]:
    """In any order, and in one."""
    if stage.dry:  # the interpreter's bits depend on the sizes of tiles
        return PlainLinear, partial(OrderedLinear, tiles=DRY_TILES, gated=False)
    dtype = torch.bfloat16
    return (
        choose_linears("auto", stage.device, dtype),
        choose_linears("auto", stage.device, dtype, deterministic=True),
    )


def _made(make: LinearFactory, weight_OI: Tensor, *, gated: bool) -> Linear:
    if not gated:
        return make(weight_OI, None)
    if isinstance(make, GatedLinears):
        return make.gated(weight_OI, None)
    return ActivatedLinear(make(weight_OI, None), silu_mul)


def _time(stage: Stage, linears: list[Linear], x_NI: Tensor) -> Timing:
    return time_device(stage, lambda index: linears[index](x_NI), len(linears))


def _draw(stage: Stage, shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, device=stage.device, generator=stage.generator(seed)).bfloat16()
