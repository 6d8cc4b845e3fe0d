"""Launches for runners that run a step at once: fills in pending tokens, and runs several steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch


class StepByStep:
    """Keeps the picks of the last batch."""

    def __init__(self) -> None:
        self._last: list[ItemOutput] = []

    def run(self, batch: ScheduledBatch, execute: Callable[[ScheduledBatch], ModelOutput]) -> ModelOutput:
        """`execute` runs one step in which every token is known. It is not kept as an attribute: it may belong to the
        runner that owns this object, and a runner's memory is freed with its last reference."""
        items = [self._known(item) for item in batch.items]
        outputs = execute(ScheduledBatch(items)).items
        for _ in range(batch.num_steps - 1):
            items = [_next(item, output) for item, output in zip(items, outputs, strict=True)]
            more = execute(ScheduledBatch(items)).items
            outputs = [ItemOutput(a.token_ids + b.token_ids) for a, b in zip(outputs, more, strict=True)]
        self._last = outputs
        return ModelOutput(outputs)

    def _known(self, item: BatchItem) -> BatchItem:
        if item.pending_from is None:
            return item
        return replace(item, token_ids=[self._last[item.pending_from].token_ids[-1]])


def _next(item: BatchItem, output: ItemOutput) -> BatchItem:
    """The item of the step after the one that gave `output`."""
    assert item.sample is not None
    return replace(item, token_ids=[output.token_ids[-1]], start=item.start + 1)
