"""The memory behind the KV books: one tensor, addressed by slot.

A head's tokens lie one after another, so that a session's keys are one stream of memory per head.

Legend: L layers, 2 key and value, K key/value heads, S slots (num_pages * page_size), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelSpec
from engine.settings import CacheSettings


class PoolTooSmall(ValueError):
    """The settings leave no room for a single page."""


@dataclass(frozen=True, slots=True)
class KVPool:
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


def make_kv_pool(
    spec: ModelSpec, settings: CacheSettings, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """Raises PoolTooSmall if `size_bytes` is less than a page."""
    page_bytes = spec.kv_elements_per_token * dtype.itemsize * settings.page_size
    num_pages = settings.num_pages if settings.num_pages is not None else settings.size_bytes // page_bytes
    if num_pages < 1:
        raise PoolTooSmall(f"a KV page takes {page_bytes} bytes, the cache has {settings.size_bytes}")
    shape = (spec.num_layers, 2, spec.num_kv_heads, num_pages * settings.page_size, spec.head_dim)
    return KVPool(torch.empty(shape, dtype=dtype, device=device), settings.page_size)
