"""The device memory that steps read, at fixed addresses, and how a batch gets there.

The integers of a step with n rows are one block, n numbers for each field, and are copied at once. Blocks of all sizes
begin at the same address. So a CUDA graph captured for n rows finds its fields where the next batch of n rows puts
them.

Legend: N rows of the step (n: as many as there is room for), B items, R rows whose token is picked, M pages of the
longest sequence, P pools, F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionTables, ItemLens
from engine.batch import BatchItem, ScheduledBatch
from engine.device import pinned
from engine.runner.draw_points import DrawPoints
from engine.runner.page_tables import PageTables
from engine.runner.sample_table import SampleTable

TOKEN, SOURCE, POSITION, END, KV_LEN, TABLE, SAMPLED, SLOT = range(8)
"""Fields of the integers. For each row: its token, or the row of the last picks that has it (else -1), and its
position. For each item: the row after its last, its KV's length, and the row of its page table. Then the rows to
sample, and each pool's slots by row."""

TEMPERATURE, TOP_K, TOP_P, MIN_P, POINT = range(5)
"""Fields of the floats, by sampled row. There is a field of points for each of the steps in one launch."""

LARGEST_POINT = 1.0 - 2.0**-24
"""Below 1 in float32."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows` and `items` of the buffers that are in use, padding included. `decode`: row b is item b."""

    rows: int
    items: int
    decode: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """One shape's view of the buffers. `unpack` makes `tokens_N`, `positions_N`, `sampled_N` and the tables' int64
    slots from `ints_FN`."""

    shape: StepShape
    ints_FN: Tensor
    tokens_N: Tensor
    positions_N: Tensor
    sampled_N: Tensor
    tables: AttentionTables

    def blank(self) -> None:
        """Makes a step of padding alone, whose keys and values are not written."""
        self.ints_FN.zero_()
        self.ints_FN[SLOT:] = -1
        for slots_N in self.tables.slots_PN:
            slots_N.fill_(-1)

    def unpack(self, picks_R: Tensor) -> None:
        """Fills in pending tokens, and converts every field to the type that operators take."""
        ints_FN, rows = self.ints_FN, self.shape.rows
        source_N = ints_FN[SOURCE].long()
        picked_N = picks_R.index_select(0, source_N.clamp(min=0))
        torch.where(source_N < 0, ints_FN[TOKEN].long(), picked_N, out=self.tokens_N)
        self.positions_N.copy_(ints_FN[POSITION])
        self.sampled_N.copy_(ints_FN[SAMPLED])
        self.tables.query_starts_B1[1:].copy_(ints_FN[END, : self.shape.items])
        self.tables.kv_lens_B.copy_(ints_FN[KV_LEN, : self.shape.items])
        for pool, slots_N in enumerate(self.tables.slots_PN):
            slots_N.copy_(ints_FN[SLOT + pool, :rows])

    def advance(self, picks_R: Tensor, page_size: int) -> None:
        """Moves a decode on by one token, without the host. Padding stays padding."""
        assert self.shape.decode
        rows, tables = self.shape.rows, self.tables
        self.tokens_N.copy_(picks_R[:rows])
        self.positions_N.add_(1)
        tables.kv_lens_B.add_((tables.kv_lens_B > 0).int())
        page_B1 = (self.positions_N // page_size)[:, None]
        for slots_N, pages_BM in zip(tables.slots_PN, tables.pages_PBM, strict=True):
            inside_B1 = page_B1.clamp(max=pages_BM.shape[1] - 1)
            first_B = pages_BM.gather(1, inside_B1)[:, 0].long() * page_size
            torch.where(slots_N < 0, slots_N, first_B + self.positions_N % page_size, out=slots_N)


class StepBuffers:
    """Owns the buffers and two sets of pinned memory beside them: the copy of a step may still run while the next step
    is written, but never while the one after that is.

    Sizes are the most of each that a step can have; `num_pools` is 1 or 2.
    """

    def __init__(
        self, max_rows: int, max_items: int, max_sampled: int, max_pages: int, num_pools: int,
        max_steps: int, page_size: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._num_fields = SLOT + num_pools
        self._page_size = page_size
        self._max_kv_len = max_pages * page_size
        self._num_pools = num_pools
        self._ints = torch.zeros(self._num_fields * max_rows, dtype=torch.int32, device=device)
        self._longs_XN = torch.zeros((3 + num_pools, max_rows), dtype=torch.int64, device=device)
        self._starts_B1 = torch.zeros(max_items + 1, dtype=torch.int32, device=device)
        self._kv_lens_B = torch.zeros(max_items, dtype=torch.int32, device=device)
        self._tables = PageTables(num_pools, max_items, max_pages, device)
        self._pages_PBM = torch.full_like(self._tables.pages_PRM, -1)
        self._floats = torch.zeros((POINT + max_steps) * max_sampled, device=device)
        self._top_k_R = torch.zeros(max_sampled, dtype=torch.int32, device=device)
        self.picks_R = torch.zeros(max(max_sampled, max_items), dtype=torch.int64, device=device)
        self._staging = [_Staging(self._ints.numel(), self._floats.numel(), device) for _ in range(2)]
        self._points = DrawPoints()
        self._count = 0

    def tensors(self, shape: StepShape, lens: Sequence[ItemLens] | None = None) -> StepTensors:
        """Views; nothing is copied. Without `lens` one item may have all rows, which a graph must allow for."""
        rows, items = shape.rows, shape.items
        tables = AttentionTables(
            self._starts_B1[: items + 1],
            self._kv_lens_B[:items],
            tuple(pages_BM[:items] for pages_BM in self._pages_PBM.unbind(0)),
            tuple(self._longs_XN[3:, :rows].unbind(0)),
            1 if shape.decode else max(each.queries for each in lens) if lens else rows,
            self._max_kv_len,
            None if lens is None else tuple(lens),
        )
        ints_FN = self._ints[: self._num_fields * rows].view(self._num_fields, rows)
        tokens_N, positions_N, sampled_N = self._longs_XN[:3, :rows].unbind(0)
        return StepTensors(shape, ints_FN, tokens_N, positions_N, sampled_N, tables)

    def sample_table(self, num_sampled: int) -> SampleTable:
        floats_FR = self._floats[: (POINT + 1) * num_sampled].view(-1, num_sampled)
        top_k_R = self._top_k_R[:num_sampled]
        return SampleTable(
            floats_FR[TEMPERATURE], top_k_R, floats_FR[TOP_P], floats_FR[MIN_P], floats_FR[POINT]
        )

    def unpack_samples(self, num_sampled: int) -> None:
        """Converts the sample table's fields to their types; part of what a graph replays."""
        self._top_k_R[:num_sampled].copy_(self._floats[TOP_K * num_sampled : (TOP_K + 1) * num_sampled])

    def next_points(self, num_sampled: int, step: int) -> None:
        """Makes the sample table draw for step `step` of several in one launch."""
        points_SR = self._floats[POINT * num_sampled :]
        later_R = points_SR[step * num_sampled : (step + 1) * num_sampled]
        points_SR[:num_sampled].copy_(later_R)

    def fill(self, batch: ScheduledBatch, shape: StepShape, num_sampled: int, last_rows: list[int]) -> None:
        """Starts copying a batch to the device. `num_sampled` includes padding; `last_rows` has, for each item of the
        previous batch, the row of its last pick."""
        self._count += 1
        staging = self._staging[self._count % 2]
        ints = staging.ints[: self._num_fields * shape.rows]
        ints_FN = ints.numpy().reshape(self._num_fields, shape.rows)
        self._write_rows(ints_FN, batch.items, shape, last_rows)
        ints_FN[TABLE, : len(batch.items)] = self._tables.update(batch.items)
        self._ints[: len(ints)].copy_(ints, non_blocking=True)
        self._lay_out_tables(batch, shape)
        floats = staging.floats[: (POINT + batch.num_steps) * num_sampled]
        self._write_samples(floats.numpy().reshape(POINT + batch.num_steps, num_sampled), batch)
        self._floats[: len(floats)].copy_(floats, non_blocking=True)

    def miss(self, items: list[BatchItem]) -> None:
        """A step of these items runs without the buffers."""
        self._tables.forget(items)

    def _write_rows(
        self, ints_FN: NDArray[np.int32], items: list[BatchItem], shape: StepShape, last_rows: list[int]
    ) -> None:
        """Uses lists of plain integers: setting numbers of an array one by one is several times slower."""
        rows, sources = _Rows([[] for _ in range(self._num_pools)]), []
        for item in items:
            first = len(rows.tokens)
            rows.add(item, self._page_size)
            if item.pending_from is not None:
                sources.append((first, last_rows[item.pending_from]))
        num_rows, num_items = len(rows.tokens), len(items)
        ints_FN[TOKEN, :num_rows] = rows.tokens
        ints_FN[TOKEN, num_rows:] = 0
        ints_FN[POSITION, :num_rows] = rows.positions
        ints_FN[POSITION, num_rows:] = 0
        ints_FN[END, :num_items] = rows.ends
        ints_FN[END, num_items : shape.items] = num_rows
        ints_FN[KV_LEN, :num_items] = rows.kv_lens
        ints_FN[KV_LEN, num_items : shape.items] = 0
        ints_FN[SAMPLED, : len(rows.sampled)] = rows.sampled
        ints_FN[SAMPLED, len(rows.sampled) :] = 0
        for pool, slots in enumerate(rows.slots):
            ints_FN[SLOT + pool, :num_rows] = slots
        ints_FN[SLOT:, num_rows:] = -1
        ints_FN[SOURCE] = -1
        if sources:
            places, picks = zip(*sources, strict=True)
            ints_FN[SOURCE, places] = picks

    def _lay_out_tables(self, batch: ScheduledBatch, shape: StepShape) -> None:
        """Puts the items' tables in their order for the step to read, with only as many columns as the longest
        needs."""
        num_items = len(batch.items)
        ends = [item.start + len(item.token_ids) + batch.num_steps - 1 for item in batch.items]
        width = -(-max(ends) // self._page_size)
        rows_B = self._ints[TABLE * shape.rows :][:num_items]
        for pages_RM, pages_BM in zip(self._tables.pages_PRM, self._pages_PBM, strict=True):
            pages_BM[:num_items, :width].copy_(pages_RM[:, :width].index_select(0, rows_B))

    def _write_samples(self, floats_FR: NDArray[np.float32], batch: ScheduledBatch) -> None:
        columns: list[tuple[float, ...]] = []
        greedy = (0.0,) * len(floats_FR)
        for item in batch.items:
            spec = item.sample
            if spec is None:
                continue
            params = spec.params
            if params.greedy:
                columns += [greedy] * (1 + item.num_drafts)
                continue
            filters = (params.temperature, params.top_k, params.top_p, params.min_p)
            for draft in range(1 + item.num_drafts):
                first = item.certain_len + draft
                steps = range(first, first + batch.num_steps)
                points = [min(self._points.point(params.seed, position), LARGEST_POINT) for position in steps]
                columns.append((*filters, *points))
        if columns:
            floats_FR[:, : len(columns)] = np.array(columns, dtype=np.float32).T
        floats_FR[:, len(columns) :] = 0.0


class _Rows:
    """Collects a batch's rows: tokens, positions and each pool's slots by row, the rest by item."""

    def __init__(self, slots: list[list[int]]) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots = slots
        self.ends: list[int] = []
        self.kv_lens: list[int] = []
        self.sampled: list[int] = []

    def add(self, item: BatchItem, page_size: int) -> None:
        count, start = len(item.token_ids), item.start
        self.tokens += item.token_ids
        end = len(self.tokens)
        self.ends.append(end)
        self.kv_lens.append(start + count)
        if count == 1:
            self.positions.append(start)
            page, offset = divmod(start, page_size)
            for slots, pages in zip(self.slots, _tables(item), strict=True):
                slots.append(int(pages[page]) * page_size + offset)
        else:
            positions = np.arange(start, start + count)
            self.positions += positions.tolist()
            for slots, pages in zip(self.slots, _tables(item), strict=True):
                slots += (pages[positions // page_size] * page_size + positions % page_size).tolist()
        if item.sample is not None:
            self.sampled += range(end - 1 - item.num_drafts, end)


class _Staging:
    """Host memory from which copies to the device start."""

    def __init__(self, num_ints: int, num_floats: int, device: torch.device) -> None:
        self.ints = pinned(num_ints, torch.int32, device)
        self.floats = pinned(num_floats, torch.float32, device)


def _tables(item: BatchItem) -> tuple[NDArray[np.int32], ...]:
    return (item.pages,) if item.window_pages is None else (item.pages, item.window_pages)
