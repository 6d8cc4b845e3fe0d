"""The flat arrays of a step. The quick way for decodes gives what the general one gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.runner.inputs import make_inputs

CPU = torch.device("cpu")


def item(tokens: list[int], start: int, pages: list[int], sampled: bool = True) -> BatchItem:
    spec = SampleSpec(SamplingParams()) if sampled else None
    return BatchItem("r", tokens, start, np.asarray(pages, dtype=np.int32), False, spec)


def test_mixed_batch() -> None:
    batch = ScheduledBatch([item([7, 8, 9], 3, [5, 2]), item([4], 0, [1], False), item([6], 4, [3, 0])])
    inputs = make_inputs(batch, 4, CPU)
    assert inputs.tokens_N.tolist() == [7, 8, 9, 4, 6]
    assert inputs.positions_N.tolist() == [3, 4, 5, 0, 4]
    assert [slots_N.tolist() for slots_N in inputs.slots_PN] == [[23, 8, 9, 4, 0]]
    assert inputs.sample_rows_R is not None
    assert inputs.sample_rows_R.tolist() == [2, 4]
    assert [(entry.query_len, entry.kv_len) for entry in inputs.attention] == [(3, 6), (1, 1), (1, 5)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_decode_is_the_general_case(page_size: int) -> None:
    decodes = [item([7], 5, [9, 8, 7, 6, 5, 4]), item([1, 2, 3], 2, [2, 1, 0, 3, 5]), item([4], 0, [2])]
    decodes[1].num_drafts = 2
    quick = make_inputs(ScheduledBatch(decodes), page_size, CPU)
    general = make_inputs(ScheduledBatch([*decodes, item([0], 0, [1], False)]), page_size, CPU)
    assert quick.sample_rows_R is None
    assert general.sample_rows_R is not None
    assert general.sample_rows_R.tolist() == [0, 1, 2, 3, 4]
    for name in ("tokens_N", "positions_N"):
        assert getattr(quick, name).tolist() == getattr(general, name).tolist()[:5]
    assert [slots_N.tolist() for slots_N in quick.slots_PN] == [general.slots_PN[0].tolist()[:5]]


@pytest.mark.parametrize("count", [1, 2])
def test_window_pages_have_slots_of_their_own(count: int) -> None:
    items = [item([5] * count, 9, [3, 1, 2]), item([6], 0, [4])]
    items[0].window_pages = np.asarray([-1, -1, 7], dtype=np.int32)
    items[1].window_pages = np.asarray([0], dtype=np.int32)
    inputs = make_inputs(ScheduledBatch(items), 4, CPU)
    assert inputs.slots_PN[0].tolist() == [*[9, 10][:count], 16]
    assert inputs.slots_PN[1].tolist() == [*[29, 30][:count], 0]
    assert inputs.attention[0].window_pages is items[0].window_pages
