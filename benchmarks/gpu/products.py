"""Products of few rows with fixed weights: ours and cuBLAS's, against the time it takes to read the weights.

Shapes are those of an 8 B-parameter Llama. Weights rotate over more memory than the L2 cache has; rows and results stay
in the cache, as in a step.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention_scene import WrongResult
from benchmarks.gpu.ceilings import read_bandwidth
from benchmarks.gpu.stage import Stage, Timing, time_device
from engine.kernels.few_rows import TILES, FewRowsLinear, RowTiles
from engine.models.linear import LinearFactory, PlainLinear

TOLERANCE = 0.01
ROTATED_BYTES = 256 * 2**20
SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate + up": (28_672, 4096),
    "down": (4096, 14_336),
    "head": (128_256, 4096),
}
DRY_SHAPES = {"qkv": (40, 48), "head": (70, 33)}
ROWS = (1, 2, 4, 8)
DRY_ROWS = (1, 8)


@dataclass(frozen=True, slots=True)
class Timed:
    timing: Timing
    error: float


class Product:
    """One shape: its weights, and the float64 results of up to max(ROWS) rows with them."""

    def __init__(self, stage: Stage, outputs: int, inputs: int) -> None:
        self._stage = stage
        self.shape = outputs, inputs
        count = 2 if stage.dry else max(2, -(-ROTATED_BYTES // (outputs * inputs * 2)))
        self._x_NI = self._draw((max(ROWS), inputs), 20)
        self._weights = [self._draw((outputs, inputs), 21 + index) for index in range(count)]
        self._wide = [self._x_NI.double() @ weight_OI.double().t() for weight_OI in self._weights]

    def num_bytes(self, rows: int) -> int:
        return self._weights[0].nbytes + rows * sum(self.shape) * 2

    def time(self, make: LinearFactory, rows: int, repeats: int = 11) -> Timed:
        """Times the products, then poisons the results, computes and checks them. Raises WrongResult."""
        linears = [make(weight_OI, None) for weight_OI in self._weights]
        x_NI = self._x_NI[:rows]
        results: dict[int, Tensor] = {}
        errors: list[float] = []

        def call(index: int) -> None:
            results[index] = linears[index](x_NI)

        def check(run: Callable[[], object]) -> None:
            for result_NO in results.values():
                result_NO.fill_(torch.nan)
            run()
            for index, result_NO in results.items():
                wide_NO = self._wide[index][:rows]
                errors.append(float((result_NO.double() - wide_NO).norm() / wide_NO.norm()))

        timing = time_device(self._stage, call, len(linears), repeats, after=check)
        if not all(error < TOLERANCE for error in errors):
            raise WrongResult(f"{self.shape} by {rows} rows: errors {errors}")
        return Timed(timing, max(errors))

    def _draw(self, shape: tuple[int, int], seed: int) -> Tensor:
        stage = self._stage
        return torch.randn(shape, device=stage.device, generator=stage.generator(seed)).bfloat16()


def way_of(tiles: RowTiles) -> LinearFactory:
    return partial(FewRowsLinear, tiles=tiles)


def run(stage: Stage) -> None:
    shapes = {
        f"product {outputs:,} × {inputs:,} ({name})": (outputs, inputs)
        for name, (outputs, inputs) in (DRY_SHAPES if stage.dry else SHAPES).items()
    }
    wanted = {name: shape for name, shape in shapes.items() if stage.wants(name)}
    read = read_bandwidth(stage) if wanted else 0.0
    for name, shape in wanted.items():
        stage.attempt(name, partial(report, stage, name, shape, read))


def report(stage: Stage, name: str, shape: tuple[int, int], read: float) -> None:
    """Times one shape and adds its rows. Raises WrongResult."""
    product = Product(stage, *shape)
    ways = {"cuBLAS": PlainLinear} | {f"few{tiles.block_o}": way_of(tiles) for tiles in TILES}
    for rows in DRY_ROWS if stage.dry else ROWS:
        timed = {way: product.time(make, rows) for way, make in ways.items()}
        floor_s = product.num_bytes(rows) / read
        shares = {way: floor_s / each.timing.median_s for way, each in timed.items()}
        best = max((way for way in shares if way != "cuBLAS"), key=shares.__getitem__)
        stage.row(
            f"{name}, {rows} row{'s' * (rows > 1)}", timed[best].timing.median_s * 1e6, "us",
            limit=floor_s * 1e6, share=shares[best],
            note=f"{best}; " + ", ".join(f"{way} {100 * share:.1f} %" for way, share in shares.items() if way != best),
            details={
                way: {"seconds": each.timing.median_s, "best_s": each.timing.best_s, "by": each.timing.by,
                      "share": shares[way], "error": each.error}
                for way, each in timed.items()
            },
        )  # fmt: skip
