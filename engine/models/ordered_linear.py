"""Products that give a row the same bits for any number of rows, on a GPU: one kernel with many tiles, of which the
quickest is found by timing, for each shape of matrix and number of rows.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from engine.kernels.ordered_product import OrderedTiles, multiply_in_order
from engine.models.linear import Linear
from engine.models.measured_linear import MeasuredGated, MeasuredLinears, Timer

ORDERED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
"""Numbers of rows that are timed."""

TILES = (
    OrderedTiles(64, 64, 64, 4, 3),  # the first runs on every card
    OrderedTiles(8, 16, 128, 2, 5),
    OrderedTiles(8, 64, 128, 4, 4),
    OrderedTiles(16, 32, 128, 4, 5),
    OrderedTiles(16, 64, 128, 4, 4),
    OrderedTiles(32, 64, 128, 4, 4),
    OrderedTiles(64, 64, 128, 4, 4),
    OrderedTiles(64, 128, 64, 4, 4),
    OrderedTiles(128, 64, 64, 4, 4),
    OrderedTiles(128, 64, 128, 4, 3),
    OrderedTiles(128, 128, 64, 8, 4),
    OrderedTiles(256, 64, 64, 8, 4),
    OrderedTiles(256, 128, 64, 8, 3),
)
FLOAT32_TILES = (OrderedTiles(16, 32, 32, 4, 2), OrderedTiles(64, 64, 16, 4, 2))
"""No matrix units: every thread holds what it multiplies."""

ROWS_OF_TILES = 8
"""Tiles are not tried for more rows than so many times their own."""

MOST_GATED_SUMS = 64
"""Of each of two matrices; with more, registers spill."""


class OrderedLinear:
    """A Linear; silu(gate) * up if it is gated."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, tiles: OrderedTiles, *, gated: bool) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._tiles = tiles
        self._gated = gated

    def __call__(self, x_NI: Tensor) -> Tensor:
        return multiply_in_order(x_NI, self._weight_OI, self._bias_O, self._tiles, gated=self._gated)


class OrderedLinears:
    """Both Linears and GatedLinears. Raises UnsupportedModel for a matrix if the device does not sum alike."""

    def __init__(self, timer: Timer) -> None:
        self._plain, self._gated = (
            MeasuredLinears({}, timer, ORDERED_ROWS, better=1.0, exact=True) for _ in range(2)
        )

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._choose(self._plain, weight_OI, bias_O, gated=False)

    def gated(self, gate_up_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._choose(self._gated, gate_up_OI, bias_O, gated=True)

    def describe(self) -> Mapping[str, str]:
        return MeasuredGated(self._plain, self._gated).describe()

    def _choose(
        self, measured: MeasuredLinears, weight_OI: Tensor, bias_O: Tensor | None, *, gated: bool
    ) -> Linear:
        makes: dict[str, Callable[[], Linear]] = {}
        most_rows: dict[str, int] = {}
        for tiles in FLOAT32_TILES if weight_OI.dtype == torch.float32 else TILES:
            if gated and tiles.sums_of_thread > MOST_GATED_SUMS:
                continue
            name = f"ordered_{tiles.block_n}x{tiles.block_o}x{tiles.block_i}"
            makes[name] = partial(OrderedLinear, weight_OI, bias_O, tiles, gated=gated)
            if len(makes) > 1:  # the first is for any number
                most_rows[name] = ROWS_OF_TILES * tiles.block_n
        outputs, inputs = weight_OI.shape
        shape = outputs, inputs, bias_O is not None
        return measured.choose(shape, weight_OI.dtype, weight_OI.device, makes, most_rows)
