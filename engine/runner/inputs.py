"""Turns a ScheduledBatch into the flat arrays that the model takes.

Legend: N tokens of all items, one after another; P pools of KV (full attention, then sliding windows if the model has
them); R rows whose logits pick a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionItem
from engine.batch import BatchItem, ScheduledBatch
from engine.models.protocol import AdapterRows


@dataclass(slots=True)
class ModelInputs:
    """`slots_PN` is where each token's KV goes in each pool. `sample_rows_R` is None if every row is sampled, in
    order."""

    tokens_N: Tensor
    positions_N: Tensor
    slots_PN: tuple[Tensor, ...]
    sample_rows_R: Tensor | None
    attention: list[AttentionItem]


def make_inputs(batch: ScheduledBatch, page_size: int, device: torch.device) -> ModelInputs:
    items = batch.items
    if all(item.sample is not None and len(item.token_ids) == 1 + item.num_drafts for item in items):
        return _decode_inputs(items, page_size, device)
    return _mixed_inputs(items, page_size, device)


def attention_item(item: BatchItem) -> AttentionItem:
    count = len(item.token_ids)
    return AttentionItem(count, item.start + count, item.pages, item.contiguous, item.window_pages)


def sample_rows(items: list[BatchItem]) -> list[int]:
    """Rows of the last certain token of every item that samples, each followed by those of its drafts."""
    rows: list[int] = []
    end = 0
    for item in items:
        end += len(item.token_ids)
        if item.sample is not None:
            rows.extend(range(end - 1 - item.num_drafts, end))
    return rows


def adapter_rows(items: Sequence[BatchItem]) -> list[AdapterRows] | None:
    """Which rows have which adapter; None if none has one."""
    if not any(item.adapter for item in items):
        return None
    return [
        AdapterRows(adapter, sum(len(item.token_ids) for item in group))
        for adapter, group in groupby(items, key=lambda item: item.adapter)
    ]


def _decode_inputs(items: list[BatchItem], page_size: int, device: torch.device) -> ModelInputs:
    """One token of each item and its drafts, each with a row. Plain integers are faster than arrays here."""
    table: list[list[int]] = [[], []]
    for item in items:
        table[0].extend(item.token_ids)
        table[1].extend(range(item.start, item.start + len(item.token_ids)))
    for pages_of_items in _page_tables(items):
        slots: list[int] = []
        for item, pages in zip(items, pages_of_items, strict=True):
            positions = range(item.start, item.start + len(item.token_ids))
            slots += [int(pages[p // page_size]) * page_size + p % page_size for p in positions]
        table.append(slots)
    table_XN = torch.tensor(table, dtype=torch.int64, device=device)
    return _model_inputs(table_XN, None, items)


def _mixed_inputs(items: list[BatchItem], page_size: int, device: torch.device) -> ModelInputs:
    page_tables = _page_tables(items)
    table = np.empty((2 + len(page_tables), sum(len(item.token_ids) for item in items)), dtype=np.int64)
    row = 0
    for index, item in enumerate(items):
        share = slice(row, row + len(item.token_ids))
        positions = np.arange(item.start, item.start + len(item.token_ids))
        table[0, share] = item.token_ids
        table[1, share] = positions
        for pool, tables in enumerate(page_tables):
            first_slots = tables[index][positions // page_size].astype(np.int64) * page_size
            table[2 + pool, share] = first_slots + positions % page_size
        row = share.stop
    rows_R = torch.tensor(sample_rows(items), dtype=torch.int64, device=device)
    return _model_inputs(torch.from_numpy(table).to(device), rows_R, items)


def _page_tables(items: list[BatchItem]) -> list[list[NDArray[np.int32]]]:
    """The tables of all items, by pool."""
    full = [item.pages for item in items]
    window = [item.window_pages for item in items if item.window_pages is not None]
    assert len(window) in (0, len(items)), "all items have window pages or none has"
    return [full, window] if window else [full]


def _model_inputs(table_XN: Tensor, sample_rows_R: Tensor | None, items: list[BatchItem]) -> ModelInputs:
    """Rows of the table: tokens, positions, then slots by pool."""
    tokens_N, positions_N, *slots_PN = table_XN.unbind(0)
    attention = [attention_item(item) for item in items]
    return ModelInputs(tokens_N, positions_N, tuple(slots_PN), sample_rows_R, attention)
