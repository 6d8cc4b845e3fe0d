"""The runner turns a ScheduledBatch into model work and sampled tokens, and moves KV between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from cache.tiers import PoolPages
from cache.token_chain import ANY_KV, KVIdentity
from engine.batch import ModelOutput, ScheduledBatch


class RunnerLost(RuntimeError):
    """No step can run any more: the device has failed, or does not finish its work."""


class Launch(Protocol):
    """A step in flight."""

    def result(self) -> ModelOutput:
        """Waits for the step. Called once, in the order of launches. Raises whatever went wrong in the step; RunnerLost
        means that the runner cannot go on."""


class Done:
    """A Launch of a step that ran at once."""

    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def result(self) -> ModelOutput:
        return self._output


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What never changes about a runner.

    A page's bytes are those of its KV over all layers with full attention, the draft model's included; a window page's
    over all layers with a sliding window, which have a pool of their own. `window_len` is the widest window in tokens,
    None without such layers. `runs_ahead`: it pays to launch a batch before the result of the previous one is taken; at
    most two are in flight at any time. `identity` is that of the KV it makes; its `weights` are the fingerprint of the
    model. `adapters` are the fingerprints of the adapters that items may name.
    """

    num_pages: int
    page_size: int
    page_size_bytes: int
    vocab_size: int
    max_context_len: int
    window_len: int | None = None
    num_window_pages: int = 0
    window_page_size_bytes: int = 0
    runs_ahead: bool = False
    identity: KVIdentity = ANY_KV
    adapters: Mapping[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """Owns the model's weights and the KV pools' memory. Called only from the engine's thread."""

    @property
    def facts(self) -> RunnerFacts: ...

    def launch(self, batch: ScheduledBatch) -> Launch:
        """Starts a step: writes the KV of every token in the batch, then samples and verifies where asked. Steps, saves
        and clones see memory as if each were done before the next is called. Raises what Launch.result raises."""

    def describe(self) -> dict[str, str | int | float | bool]:
        """What the runner runs on and how, to be reported at start."""

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        """Copies pages to host memory under `key`, beside compute. The copy contains what earlier steps wrote. If the
        pages are written again before the future is done, the copy is invalid and the caller drops it."""

    def spill(self, source: int, key: int) -> Future[None]:
        """Writes what is in host memory under `source` to disk under `key`, beside compute and other copies. A failed
        spill leaves nothing under `key`."""

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        """Copies what was saved or spilled under `key` into `pages` (the same number, in the same order), beside
        compute. Steps may read them once the future is done."""

    def drop(self, key: int) -> None:
        """Forgets what is under `key`; its copies must be done. Unknown keys are a bug."""

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        """Copies pages within the pools, before any later step."""

    def close(self) -> None:
        """Waits for running copies. Nothing may be called afterwards."""
