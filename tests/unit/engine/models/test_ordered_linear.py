"""Which tiles products in one order have. The products are torch's, and times are the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.kernels.ordered_product import OrderedTiles
from engine.models import ordered_linear
from engine.models.ordered_linear import FLOAT32_TILES, MOST_GATED_SUMS, TILES, OrderedLinears


class Product:
    """Stands in for multiply_in_order, and notes with which tiles it was called. Tiles that are `too_large` fail."""

    def __init__(self, too_large: int) -> None:
        self.too_large = too_large
        self.tiles: list[OrderedTiles] = []

    def __call__(
        self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: OrderedTiles, *, gated: bool
    ) -> Tensor:
        if tiles.sums_of_thread > self.too_large:
            raise RuntimeError("out of shared memory")
        self.tiles.append(tiles)
        out_NO = (x_NI.double() @ weight_OI.double().t()).to(x_NI.dtype)
        if bias_O is not None:
            out_NO += bias_O
        gate_NF, up_NF = out_NO.chunk(2, 1) if gated else (out_NO, None)
        return out_NO if up_NF is None else silu(gate_NF) * up_NF


def last_is_quickest(calls: Sequence[Callable[[], object]]) -> list[float]:
    return [2.0] * (len(calls) - 1) + [1.0]


@pytest.mark.parametrize("too_large", [10_000, 32])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_rows_has_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gated: bool, too_large: int
) -> None:
    """Tiles are tried for some times their own rows. Where all larger ones failed, none was left for 2,048 rows: in
    float32 everywhere, and on cards with little shared memory."""
    monkeypatch.setattr(ordered_linear, "multiply_in_order", product := Product(too_large))
    linears = OrderedLinears(last_is_quickest)
    weight_OI = torch.randn(12, 8).to(dtype)
    linear = linears.gated(weight_OI, None) if gated else linears(weight_OI, None)
    first, *_ = all_tiles = FLOAT32_TILES if dtype == torch.float32 else TILES
    used = {}
    for rows in (0, 1, 7, 300, 2048, 5000):
        product.tiles.clear()
        assert linear(torch.randn(rows, 8).to(dtype)).shape == (rows, 6 if gated else 12)
        (used[rows],) = product.tiles
    assert used[2048] == used[5000]
    assert all(tiles.sums_of_thread <= MOST_GATED_SUMS for tiles in used.values() if gated)
    if too_large == 32:
        assert used[2048] == first
        return
    others = [tiles for tiles in all_tiles if not gated or tiles.sums_of_thread <= MOST_GATED_SUMS]
    assert used[1] == others[-1]
    assert set(linears.describe()) == {"linear", "linear_reason", "gated_linear", "gated_linear_reason"}
