"""From a ScheduledBatch to the flat arrays the model takes.

Legend: N tokens of all items, one after another; R rows whose logits pick a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionItem
from engine.batch import BatchItem, ScheduledBatch


@dataclass(slots=True)
class ModelInputs:
    """`slots_N` is where each token's KV goes; `sample_rows_R` is None if every row is sampled, in order."""

    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    sample_rows_R: Tensor | None
    attention: list[AttentionItem]


def make_inputs(batch: ScheduledBatch, page_size: int, device: torch.device) -> ModelInputs:
    items = batch.items
    if all(len(item.token_ids) == 1 and item.sample is not None for item in items):
        return _decode_inputs(items, page_size, device)
    return _mixed_inputs(items, page_size, device)


def attention_item(item: BatchItem) -> AttentionItem:
    count = len(item.token_ids)
    return AttentionItem(count, item.start + count, item.pages, item.contiguous)


def sample_rows(items: list[BatchItem]) -> list[int]:
    """Rows of the last certain token of every item that samples, each followed by those of its drafts."""
    rows: list[int] = []
    end = 0
    for item in items:
        end += len(item.token_ids)
        if item.sample is not None:
            rows.extend(range(end - 1 - item.num_drafts, end))
    return rows


def _decode_inputs(items: list[BatchItem], page_size: int, device: torch.device) -> ModelInputs:
    """One token an item: plain integers beat arrays here."""
    table = [
        [item.token_ids[0] for item in items],
        [item.start for item in items],
        [int(item.pages[item.start // page_size]) * page_size + item.start % page_size for item in items],
    ]
    tokens_N, positions_N, slots_N = torch.tensor(table, dtype=torch.int64, device=device).unbind(0)
    return ModelInputs(tokens_N, positions_N, slots_N, None, [attention_item(item) for item in items])


def _mixed_inputs(items: list[BatchItem], page_size: int, device: torch.device) -> ModelInputs:
    table = np.empty((3, sum(len(item.token_ids) for item in items)), dtype=np.int64)
    row = 0
    for item in items:
        count = len(item.token_ids)
        positions = np.arange(item.start, item.start + count)
        table[0, row : row + count] = item.token_ids
        table[1, row : row + count] = positions
        table[2, row : row + count] = (
            item.pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
        )
        row += count
    tokens_N, positions_N, slots_N = torch.from_numpy(table).to(device).unbind(0)
    rows_R = torch.tensor(sample_rows(items), dtype=torch.int64, device=device)
    return ModelInputs(tokens_N, positions_N, slots_N, rows_R, [attention_item(item) for item in items])
