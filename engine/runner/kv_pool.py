"""The memory behind the KV books: a tensor for each pool of pages, addressed by slot.

A head's tokens lie one after another, so that a session's keys are one stream of memory per head.

Legend: L layers, 2 key and value, K key/value heads, S slots (num_pages * page_size), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.settings import CacheSettings


class PoolTooSmall(ValueError):
    """The settings leave no room for a single page."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a model keeps per token. `windows` has each layer's sliding window in tokens, None for full attention."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def num_window_layers(self) -> int:
        return sum(window is not None for window in self.windows)

    @property
    def window(self) -> int | None:
        """The widest window: window pages older than that are of no use to any layer."""
        return max((window for window in self.windows if window is not None), default=None)

    def page_bytes(self, num_layers: int, page_size: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize * page_size


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Slot s is token `s % page_size` of page `s // page_size`, in every layer.

    `kv_L2KSD` is uninitialised: what was never written must never be read.
    """

    kv_L2KSD: Tensor
    page_size: int

    @property
    def num_pages(self) -> int:
        return self.kv_L2KSD.shape[3] // self.page_size

    @property
    def page_size_bytes(self) -> int:
        return self.kv_L2KSD.nbytes // self.num_pages

    def layer(self, index: int) -> Tensor:
        """A view of one layer by slot [S, 2, K, D]."""
        return self.kv_L2KSD[index].permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The KV of one model. `full` holds the layers with full attention (possibly none: its pages still count
    tokens in the books), `window` those with a sliding window; `places` says for each layer where it lies.
    """

    full: PagedKV
    window: PagedKV | None
    window_len: int | None
    places: tuple[tuple[PagedKV, int], ...]

    @property
    def page_size(self) -> int:
        return self.full.page_size

    @property
    def num_pages(self) -> int:
        return self.full.num_pages

    def layer(self, index: int) -> Tensor:
        """A view of one layer by slot [S, 2, K, D], of its own pool."""
        paged, place = self.places[index]
        return paged.layer(place)


def make_kv_pool(
    layout: KVLayout,
    settings: CacheSettings,
    dtype: torch.dtype,
    device: torch.device,
    draft_page_bytes: int = 0,
) -> KVPool:
    """Raises PoolTooSmall if `size_bytes` is less than a page. A draft model's KV takes `draft_page_bytes` a page."""
    size, num_window = settings.page_size, layout.num_window_layers
    num_full = layout.num_layers - num_window
    ratio = settings.window_ratio if num_window else 0.0
    page_bytes = draft_page_bytes + layout.page_bytes(num_full, size, dtype)
    page_bytes += round(ratio * layout.page_bytes(num_window, size, dtype))
    num_pages = settings.num_pages if settings.num_pages is not None else settings.size_bytes // page_bytes
    if num_pages < 1:
        raise PoolTooSmall(f"a KV page takes {page_bytes} bytes, the cache has {settings.size_bytes}")

    def paged(num_layers: int, pages: int) -> PagedKV:
        shape = (num_layers, 2, layout.num_kv_heads, pages * size, layout.head_dim)
        return PagedKV(torch.empty(shape, dtype=dtype, device=device), size)

    full = paged(num_full, num_pages)
    window = paged(num_window, max(1, round(num_pages * ratio))) if num_window else None
    return KVPool(full, window, layout.window, tuple(_places(layout, full, window)))


def _places(layout: KVLayout, full: PagedKV, window: PagedKV | None) -> list[tuple[PagedKV, int]]:
    places: list[tuple[PagedKV, int]] = []
    counts = {False: 0, True: 0}
    for layer_window in layout.windows:
        windowed = layer_window is not None
        paged = window if windowed else full
        assert paged is not None
        places.append((paged, counts[windowed]))
        counts[windowed] += 1
    return places
