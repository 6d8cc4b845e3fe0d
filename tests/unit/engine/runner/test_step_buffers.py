"""The contents of a step's tables after a batch is unpacked into buffers that hold another batch."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import BatchItem, ScheduledBatch
from engine.runner.step_buffers import StepBuffers, StepShape

CPU = torch.device("cpu")


def item(count: int, start: int) -> BatchItem:
    return BatchItem("a", [1] * count, start, np.arange(8, dtype=np.int32), True, None)


def test_items_are_told_from_padding() -> None:
    buffers = StepBuffers(8, 8, 8, 8, 1, 1, 4, CPU)
    shape = StepShape(8, 8, decode=False)
    tensors = buffers.tensors(shape)
    for items in ([item(3, 0), item(1, 9), item(2, 5)], [item(4, 0)]):
        buffers.fill(ScheduledBatch(items), shape, 0, [])
        tensors.unpack(buffers.picks_R)
        assert tensors.tables.kv_lens_B.tolist()[len(items) :] == [0] * (8 - len(items))
