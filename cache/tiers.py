"""Where an idle session's KV lives when the device's pages are needed: host memory within a byte budget."""

from __future__ import annotations

from dataclasses import dataclass

from cache.pages import PageArray


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of each pool: of the layers with full attention, and of those with a sliding window (empty without)."""

    full: PageArray
    window: PageArray
