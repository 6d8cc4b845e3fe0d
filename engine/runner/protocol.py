"""The runner turns a ScheduledBatch into model work and sampled tokens."""

from __future__ import annotations

from typing import Protocol

from engine.batch import ModelOutput, ScheduledBatch


class Runner(Protocol):
    """Owns the model's weights and the KV pool's memory. Called only from the engine's thread."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def page_size_bytes(self) -> int:
        """Bytes of KV in one page, over all layers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_len(self) -> int: ...

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Runs one step: writes the KV of every token in the batch, then samples where asked."""
