"""The memory of the KV pools: a tensor for each pool of pages, addressed by slot.

A head's tokens lie one after another, so that a session's keys are one stream of memory per head.

Legend: L layers, J vectors of a head (2: key and value; 1: a latent, which is both), K key/value heads, S slots
(num_pages * page_size), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device import is_gpu
from engine.memory import check_free
from engine.settings import CPU_POOL_BYTES, CacheSettings, PoolTooSmall

FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a model keeps per token. `windows` has each layer's sliding window in tokens, None for full attention. With
    `latent_dim` a head has one vector in place of two: a key, whose first `latent_dim` features are the value."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    latent_dim: int | None = None

    @property
    def num_vectors(self) -> int:
        return 2 if self.latent_dim is None else 1

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def num_window_layers(self) -> int:
        return sum(window is not None for window in self.windows)

    @property
    def window(self) -> int | None:
        """The widest window: no layer needs window pages older than that."""
        return max((window for window in self.windows if window is not None), default=None)

    def page_bytes(self, num_layers: int, page_size: int, dtype: torch.dtype) -> int:
        """`dtype` is that of the pool."""
        scale = SCALE_BYTES if dtype == FP8 else 0
        heads = self.num_vectors * self.num_kv_heads
        return num_layers * heads * (self.head_dim * dtype.itemsize + scale) * page_size


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Slot s is token `s % page_size` of page `s // page_size`, in every layer.

    `kv_LJKSD` is uninitialised: what was never written must never be read. In fp8 (float8_e4m3fn) each head of a token
    is stored divided by its own scale in `scales_LJKS`, float32.
    """

    kv_LJKSD: Tensor
    page_size: int
    scales_LJKS: Tensor | None = None

    @property
    def num_pages(self) -> int:
        return self.kv_LJKSD.shape[3] // self.page_size

    @property
    def page_size_bytes(self) -> int:
        scales = 0 if self.scales_LJKS is None else self.scales_LJKS.nbytes
        return (self.kv_LJKSD.nbytes + scales) // self.num_pages

    def layer(self, index: int) -> Tensor:
        """A view of one layer by slot [S, J, K, D]."""
        return self.kv_LJKSD[index].permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The KV of one model, in its `layout`. `full` holds the layers with full attention (if there are none, its pages
    still count tokens in the books), `window` those with a sliding window. `places` says where each layer lies."""

    layout: KVLayout
    full: PagedKV
    window: PagedKV | None
    places: tuple[tuple[PagedKV, int], ...]

    @property
    def page_size(self) -> int:
        return self.full.page_size

    @property
    def num_pages(self) -> int:
        return self.full.num_pages

    def layer(self, index: int) -> Tensor:
        """A view of one layer by slot [S, J, K, D], in the layer's own pool."""
        paged, place = self.places[index]
        return paged.layer(place)


def make_kv_pool(
    layout: KVLayout,
    settings: CacheSettings,
    dtype: torch.dtype,
    device: torch.device,
    draft_page_bytes: int = 0,
    room_bytes: int = CPU_POOL_BYTES,
) -> KVPool:
    """`dtype` is that of activations. If the settings give no size, the pool takes `room_bytes`. A draft model's KV
    takes `draft_page_bytes` per page. Raises PoolTooSmall if there is no room for a page, MemoryShort if there is none
    for the pool."""
    dtype = FP8 if settings.kv_dtype == "fp8" else dtype
    size, num_window = settings.page_size, layout.num_window_layers
    num_full = layout.num_layers - num_window
    ratio = settings.window_ratio if num_window else 0.0
    page_bytes = draft_page_bytes + layout.page_bytes(num_full, size, dtype)
    page_bytes += round(ratio * layout.page_bytes(num_window, size, dtype))
    size_bytes = room_bytes if settings.size_bytes is None else settings.size_bytes
    num_pages = size_bytes // page_bytes if settings.num_pages is None else settings.num_pages
    setting = _size_setting(settings, device)
    if num_pages < 1:
        raise PoolTooSmall(f"a KV page takes {page_bytes} bytes, the cache has {size_bytes} ({setting})")
    check_free(device, num_pages * page_bytes, "the KV pool", setting)

    def paged(num_layers: int, pages: int) -> PagedKV:
        shape = (num_layers, layout.num_vectors, layout.num_kv_heads, pages * size, layout.head_dim)
        scales = torch.empty(shape[:-1], device=device) if dtype == FP8 else None
        return PagedKV(torch.empty(shape, dtype=dtype, device=device), size, scales)

    full = paged(num_full, num_pages)
    window = paged(num_window, max(1, round(num_pages * ratio))) if num_window else None
    return KVPool(layout, full, window, tuple(_places(layout, full, window)))


def _size_setting(settings: CacheSettings, device: torch.device) -> str:
    """The setting that decides the pool's size."""
    if settings.num_pages is not None:
        return "cache.num_pages"
    return "cache.memory_share" if is_gpu(device) and settings.size_bytes is None else "cache.size_mib"


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
