"""Random sequences over scattered pages, as items for the reference and as padded tables for a backend.

The scene first writes a step's history through the backend. Window pages that no query sees are gone from the tables.
Every page that is in no table is NaN. There are two kinds of padding: items without queries at the end, and rows past
the last item. A step is planned and run once while its tables hold nothing but padding. Then it runs with the real
tables.

Legend: N rows, H query heads, K key/value heads, D head size, M pages of the longest item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import (
    AttentionItem,
    AttentionStep,
    AttentionTables,
    LayerTraits,
    TableAttention,
)
from engine.attention.tables import tables_of
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.reference import ReferenceAttention

WIDE, NARROW = 40, 19
WINDOWS = (None, WIDE, None, NARROW)
"""The window of each layer. Each pool has two layers. The window pool keeps what the wide window needs."""
LONGEST = 130


@dataclass(frozen=True, slots=True)
class Padding:
    items: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Each layer's output for the live rows, and the pools' contents after the step."""

    outputs: list[Tensor]
    pools: list[Tensor]


class TableScene:
    def __init__(
        self,
        seed: int,
        page_size: int,
        most_queries: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.kv_heads, group = (int(value) for value in self.random.integers(1, 4, 2))
        self.heads, self.dim = self.kv_heads * group, int(self.random.choice([8, 32]))
        self.page_size, self.dtype, self.device = page_size, dtype, device
        count = int(self.random.integers(1, 5))
        self.lengths = [int(value) for value in self.random.integers(2, LONGEST, count)]
        self.queries = [int(self.random.integers(1, min(n - 1, most_queries) + 1)) for n in self.lengths]
        each = -(-LONGEST // page_size)
        self.num_pages = 2 * count * each
        self.tables, self.window_tables = (
            self.random.permutation(self.num_pages).astype(np.int32)[: count * each].reshape(count, each)
            for _ in range(2)
        )

    def expected(self, traits: Sequence[LayerTraits]) -> Outcome:
        pool = self._pool()
        items = self._items()
        backend = ReferenceAttention(pool)
        # It only writes the history: nobody reads what it would compute.
        self._fill_history(pool, lambda history, slots_PN: backend.begin(history, slots_PN).write)
        step = backend.begin(items, self._slots(items))
        outputs = [step(layer, *self._draw(layer), each) for layer, each in enumerate(traits)]
        return Outcome(outputs, _contents(pool))

    def got(
        self,
        make: Callable[[KVPool], TableAttention],
        traits: Sequence[LayerTraits],
        padding: Padding = Padding(),
    ) -> Outcome:
        pool = self._pool()
        backend = make(pool)
        device = self.device
        self._fill_history(pool, partial(self._writer, backend))
        items = self._items()
        tables = padded(tables_of(items, self._slots(items), device), padding)
        parts = [tables.query_starts_B1, tables.kv_lens_B, *tables.pages_PBM, *tables.slots_PN]
        contents = [part.clone() for part in parts]
        for part in parts:
            part.fill_(0 if part.dim() == 1 and part.dtype == torch.int32 else -1)
        step = backend.plan(tables)
        self._pass(step, traits, padding)
        for part, content in zip(parts, contents, strict=True):
            part.copy_(content)
        return Outcome(self._pass(step, traits, padding), _contents(pool))

    def _writer(
        self, backend: TableAttention, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]
    ) -> Callable[[int, Tensor], Tensor]:
        step = backend.plan(tables_of(items, slots_PN, self.device))
        q_NHD = torch.zeros(len(slots_PN[0]), self.heads, self.dim, dtype=self.dtype, device=self.device)
        return lambda layer, kv_NJKD: step(layer, q_NHD, kv_NJKD, LayerTraits(1.0))

    def _pass(self, step: AttentionStep, traits: Sequence[LayerTraits], padding: Padding) -> list[Tensor]:
        rows, outputs = sum(self.queries), []
        for layer, each in enumerate(traits):
            q_NHD, kv_NJKD = (_pad_rows(part, padding.rows) for part in self._draw(layer))
            out_NA = step(layer, q_NHD, kv_NJKD, each)
            assert out_NA.shape == (rows + padding.rows, self.heads * self.dim)
            outputs.append(out_NA[:rows])
        return outputs

    def traits(self, kind: str) -> list[LayerTraits]:
        random = torch.Generator().manual_seed(5)
        cap = 3.0 if "cap" in kind else None
        sinks = (
            torch.randn(self.heads, generator=random).bfloat16().to(self.device) if "sinks" in kind else None
        )
        return [LayerTraits(0.3, window, cap, sinks) for window in WINDOWS]

    def _pool(self) -> KVPool:
        settings = CacheSettings(self.page_size, self.num_pages, window_ratio=1.0)
        layout = KVLayout(self.kv_heads, self.dim, WINDOWS)
        pool = make_kv_pool(layout, settings, self.dtype, self.device)
        for paged in (pool.full, pool.window):
            assert paged is not None
            paged.kv_LJKSD.fill_(torch.nan)
        return pool

    def _history_items(self) -> list[AttentionItem]:
        lengths = [length - query for length, query in zip(self.lengths, self.queries, strict=True)]
        rows = zip(lengths, self.tables, self.window_tables, strict=True)
        return [AttentionItem(length, length, table, False, window) for length, table, window in rows]

    def _items(self) -> list[AttentionItem]:
        """The items of the step, without the window pages that are gone."""
        items = []
        for row, (length, query) in enumerate(zip(self.lengths, self.queries, strict=True)):
            count = -(-length // self.page_size)
            window_pages = self.window_tables[row, :count].copy()
            window_pages[: max(0, length - query - WIDE + 1) // self.page_size] = -1
            items.append(AttentionItem(query, length, self.tables[row, :count], False, window_pages))
        return items

    def _fill_history(
        self,
        pool: KVPool,
        begin: Callable[[Sequence[AttentionItem], Sequence[Tensor]], Callable[[int, Tensor], object]],
    ) -> None:
        """Writes the history, then fills every page that the step does not use with NaN."""
        items = self._history_items()
        rows = sum(item.query_len for item in items)
        write = begin(items, self._slots(items))
        random = torch.Generator().manual_seed(11)
        for layer in range(len(WINDOWS)):
            kv_NJKD = torch.randn(rows, 2, self.kv_heads, self.dim, generator=random)
            write(layer, kv_NJKD.to(self.device, self.dtype))
        assert pool.window is not None
        for paged, tables in (
            (pool.full, [item.pages for item in self._items()]),
            (pool.window, [item.window_pages for item in self._items()]),
        ):
            used = {int(page) for table in tables if table is not None for page in table}
            for page in set(range(self.num_pages)) - used:
                paged.kv_LJKSD[..., page * self.page_size : (page + 1) * self.page_size, :] = torch.nan

    def _slots(self, items: Sequence[AttentionItem]) -> list[Tensor]:
        def slots_of(item: AttentionItem, pages: NDArray[np.int32] | None) -> list[int]:
            assert pages is not None
            size, first = self.page_size, item.kv_len - item.query_len
            return [int(pages[t // size]) * size + t % size for t in range(first, item.kv_len)]

        full = [slot for item in items for slot in slots_of(item, item.pages)]
        window = [slot for item in items for slot in slots_of(item, item.window_pages)]
        return [torch.tensor(slots, device=self.device) for slots in (full, window)]

    def _draw(self, layer: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(100 + layer)
        rows = sum(self.queries)
        q_NHD = 2 * torch.randn(rows, self.heads, self.dim, generator=random)
        kv_NJKD = torch.randn(rows, 2, self.kv_heads, self.dim, generator=random)
        return q_NHD.to(self.device, self.dtype), kv_NJKD.to(self.device, self.dtype)


def padded(tables: AttentionTables, padding: Padding) -> AttentionTables:
    """The tables with extra items that have no queries, and extra rows whose KV is written nowhere."""
    items, rows = padding.items, padding.rows
    starts_B1 = tables.query_starts_B1
    return AttentionTables(
        torch.cat((starts_B1, starts_B1[-1:].expand(items))),
        torch.nn.functional.pad(tables.kv_lens_B, (0, items)),
        tuple(torch.nn.functional.pad(pages, (0, 0, 0, items), value=-1) for pages in tables.pages_PBM),
        tuple(torch.nn.functional.pad(slots, (0, rows), value=-1) for slots in tables.slots_PN),
        tables.max_query_len,
        tables.max_kv_len,
    )


def _pad_rows(part: Tensor, rows: int) -> Tensor:
    return torch.cat((part, part.new_full((rows, *part.shape[1:]), torch.nan)))


def _contents(pool: KVPool) -> list[Tensor]:
    assert pool.window is not None
    return [paged.kv_LJKSD.clone() for paged in (pool.full, pool.window)]
