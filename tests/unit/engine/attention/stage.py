"""Random steps for attention backends that read tables. Every pool slot that nobody may read is NaN.

Legend: N rows of the step, B items, M pages of the longest, P pools, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionItem, AttentionTables, LayerTraits, TableAttention
from engine.runner.kv_pool import FP8, KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.reference import ReferenceAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """Within this context torch fills memory that nobody has written with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Shape:
    """What a random step looks like. `items` are pairs (new tokens, all tokens). With a `window` there are two layers:
    one in the full pool, and one in the window pool, whose pages before the window are gone."""

    items: tuple[tuple[int, int], ...]
    page_size: int = 4
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.3
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    padding_items: int = 0
    padding_rows: int = 0
    spare_pages: int = 2
    """How many columns of the page tables no item needs."""

    @property
    def rows(self) -> int:
        return sum(new for new, _ in self.items)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Stage:
    """A pool with the items' histories, and one step over it: slots [P, N], q [N, H, D], kv [N, 2, K, D], sinks [H]."""

    shape: Shape
    pool: KVPool
    items: list[AttentionItem]
    slots: list[Tensor]
    q: Tensor
    kv: Tensor
    sinks: Tensor | None

    def traits(self, layer: int) -> LayerTraits:
        shape = self.shape
        return LayerTraits(shape.scale, shape.window if layer else None, shape.softcap, self.sinks)

    @property
    def layers(self) -> range:
        return range(len(self.pool.places))

    def tables(self) -> AttentionTables:
        shape = self.shape
        starts = np.cumsum([0] + [item.query_len for item in self.items] + [0] * shape.padding_items)
        lens = [item.kv_len for item in self.items] + [0] * shape.padding_items
        pages_PBM = []
        for pool in range(len(self.slots)):
            found = [item.window_pages if pool else item.pages for item in self.items]
            width = max(len(pages) for pages in found if pages is not None) + shape.spare_pages
            pages_BM = np.full((len(lens), width), -1, dtype=np.int32)
            for row, pages in enumerate(found):
                assert pages is not None
                pages_BM[row, : len(pages)] = pages
            pages_PBM.append(torch.from_numpy(pages_BM).to(DEVICE))
        slots_PN = [
            torch.cat((slots_N, torch.full((shape.padding_rows,), -1))).to(DEVICE) for slots_N in self.slots
        ]
        return AttentionTables(
            torch.from_numpy(starts.astype(np.int32)).to(DEVICE),
            torch.tensor(lens, dtype=torch.int32, device=DEVICE),
            tuple(pages_PBM),
            tuple(slots_PN),
            max(item.query_len for item in self.items),
            max(lens),
        )

    def padded(self, rows: Tensor) -> Tensor:
        """`rows` followed by the padding rows, which are NaN."""
        padding = rows.new_full((self.shape.padding_rows, *rows.shape[1:]), torch.nan)
        return torch.cat((rows, padding)).to(DEVICE)

    def expected(self) -> list[Tensor]:
        """The reference's output by layer, in float64. This writes to the pool."""
        step = ReferenceAttention(self.pool).begin(self.items, self.slots)
        # The queries are float64: the reference gives its output in their dtype, so it rounds nothing.
        return [
            step(layer, self.q.double().to(DEVICE), self.kv.to(DEVICE), self.traits(layer)).cpu()
            for layer in self.layers
        ]

    def got(self, attention: TableAttention, tables: AttentionTables | None = None) -> list[Tensor]:
        """The output of every layer for the items' rows, in float64. The output memory was NaN before."""
        outputs = []
        with memory_of_nan():
            step = attention.plan(tables or self.tables())
            for layer in self.layers:
                out_NA = step(layer, self.padded(self.q), self.padded(self.kv), self.traits(layer))
                outputs.append(out_NA[: self.shape.rows].double().cpu())
        return outputs


def make_stage(shape: Shape, seed: int) -> Stage:
    random, torch_random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    each = max(-(-total // shape.page_size) for _, total in shape.items)
    count = len(shape.items)
    windows = (None,) if shape.window is None else (None, shape.window)
    settings = CacheSettings(
        shape.page_size, each * count + 3, window_ratio=1.0, kv_dtype="fp8" if shape.fp8 else "auto"
    )
    pool = make_kv_pool(KVLayout(shape.kv_heads, shape.dim, windows), settings, shape.dtype, DEVICE)
    _poison(pool)
    tables = [random.permutation(each * count + 3).astype(np.int32) for _ in windows]

    def items(lengths: Sequence[tuple[int, int]], gone: bool) -> list[AttentionItem]:
        made = []
        for index, (new, total) in enumerate(lengths):
            by_pool = [table[index * each : index * each + -(-total // shape.page_size)] for table in tables]
            window_pages = by_pool[1].copy() if shape.window is not None else None
            if window_pages is not None and shape.window is not None and gone:
                window_pages[: max(0, total - new - shape.window + 1) // shape.page_size] = -1
            made.append(AttentionItem(new, total, by_pool[0], False, window_pages))
        return made

    def random_rows(count: int, *sizes: int) -> Tensor:
        return torch.randn(count, *sizes, generator=torch_random).to(shape.dtype)

    histories = [(total - new, total - new) for new, total in shape.items]
    past = items(histories, False)
    rows = sum(new for new, _ in histories)
    if rows:
        step = ReferenceAttention(pool).begin(past, slots_of(past, shape))
        kv_NJKD = random_rows(rows, 2, shape.kv_heads, shape.dim).to(DEVICE)
        for layer in range(len(windows)):
            step.write(layer, kv_NJKD)
    if shape.window is not None:
        _forget(pool, tables[1], histories, shape, each)
    now = items(shape.items, True)
    sinks_H = torch.randn(shape.heads, generator=torch_random).to(DEVICE) if shape.sinks else None
    return Stage(
        shape,
        pool,
        now,
        slots_of(now, shape),
        2 * random_rows(shape.rows, shape.heads, shape.dim),
        random_rows(shape.rows, 2, shape.kv_heads, shape.dim),
        sinks_H,
    )


def slots_of(items: Sequence[AttentionItem], shape: Shape) -> list[Tensor]:
    """The slots of the items' new tokens, by pool."""

    def of(pages: NDArray[np.int32] | None, item: AttentionItem) -> list[int]:
        assert pages is not None
        size = shape.page_size
        return [
            int(pages[t // size]) * size + t % size for t in range(item.kv_len - item.query_len, item.kv_len)
        ]

    found = [[slot for item in items for slot in of(item.pages, item)]]
    if shape.window is not None:
        found.append([slot for item in items for slot in of(item.window_pages, item)])
    return [torch.tensor(slots, dtype=torch.int64) for slots in found]


def _poison(pool: KVPool) -> None:
    for paged in (pool.full, pool.window):
        if paged is not None:
            _fill(paged.kv_LJKSD)
            if paged.scales_LJKS is not None:
                paged.scales_LJKS.fill_(torch.nan)


def _fill(part: Tensor) -> None:
    """Fills with NaN, which is 0x7f in float8_e4m3fn."""
    if part.dtype == FP8:
        part.view(torch.uint8).fill_(0x7F)
    else:
        part.fill_(torch.nan)


def _forget(
    pool: KVPool, table: NDArray[np.int32], histories: Sequence[tuple[int, int]], shape: Shape, each: int
) -> None:
    """Poisons all tokens that no later query sees, also those in pages that are partly in the window."""
    assert pool.window is not None
    assert shape.window is not None
    for index, (_, total) in enumerate(histories):
        for token in range(max(0, total - shape.window + 1)):
            slot = (
                int(table[index * each + token // shape.page_size]) * shape.page_size
                + token % shape.page_size
            )
            _fill(pool.window.kv_LJKSD[:, :, :, slot])
            if pool.window.scales_LJKS is not None:
                pool.window.scales_LJKS[:, :, :, slot] = torch.nan
