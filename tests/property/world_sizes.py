"""The size of a World: its pools and tiers, the limits of a step, and what its engine may do."""

from __future__ import annotations

from dataclasses import dataclass

from cache.sequence_kv import pages_for
from engine.settings import SpeculationMethod
from tests.unit.engine.driver import DRAFTS


@dataclass(frozen=True)
class Sizes:
    """A pool so small that turns evict each other. `room` is the longest sequence that is ever asked for.

    With a small vocabulary the n-gram proposer is often right. `host_pages` and `disk_pages` are the budgets of the
    tiers. With `spare_all` everything on the host goes on to disk. With `chains` turns bring the token chain of their
    history; otherwise the engine makes it.
    """

    page_size: int = 4
    num_pages: int = 16
    chunk_size: int = 3
    max_batch_tokens: int = 8
    max_running: int = 3
    eos_probability: float = 0.0
    prefix_cache: bool = True
    window_len: int | None = None
    speculation: SpeculationMethod = "off"
    vocab: int = 97
    ahead: bool = False
    decode_steps: int = 1
    host_pages: int = 0
    disk_pages: int = 0
    spare_all: bool = False
    chains: bool = True

    @property
    def num_window_pages(self) -> int:
        """Little more than one sequence needs: what it sees, what a rollback would see, and one step."""
        if self.window_len is None:
            return 0
        step = max(min(self.chunk_size, self.max_batch_tokens), self.decode_steps)
        longest = 2 * (self.window_len + 1) + (2 if self.ahead else 1) * step + DRAFTS
        return min(pages_for(longest, self.page_size) + 5, self.num_pages)

    @property
    def room(self) -> int:
        return min(self.page_size * self.num_pages, 64)
