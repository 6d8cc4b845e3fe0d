"""Attention with the compiled CPU kernels: all items at once, keys and values read in place page by page.

Legend: P pools, N tokens of the step, B items, H query heads, J vectors of a head (kv_pool.py), K key/value heads, D
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionItem, AttentionStep, AttentionUnavailable, LayerTraits
from engine.attention.torch_backend import TorchAttention
from engine.cpu.library import LARGEST_HEAD, HeadsC, ItemC, ItemsC, Kernels, LayerKVC, Workers, check
from engine.runner.kv_pool import KVPool, PagedKV

INT32 = np.dtype(np.int32).str


class CpuAttention:
    """An AttentionBackend. Raises AttentionUnavailable for pools that the kernels cannot read.

    Layers with soft caps are computed by torch's operators. If `deterministic`, the others are attended to as
    attention.h says; this takes longer.
    """

    def __init__(self, pool: KVPool, kernels: Kernels, *, deterministic: bool = False) -> None:
        dtype, head_dim = pool.full.kv_LJKSD.dtype, pool.full.kv_LJKSD.shape[-1]
        if dtype != torch.float32 or head_dim > LARGEST_HEAD:
            raise AttentionUnavailable("cpu", f"no kernels for heads of {head_dim} in {dtype}")
        self.deterministic = deterministic
        self._pool = pool
        self._kernels = kernels
        self._workers: Workers | None = None
        self._fallback = TorchAttention(pool)
        self._handle = kernels.c.kedge_attention_new()
        self._free = kernels.c.kedge_attention_free

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._free(self._handle)

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> CpuAttentionStep:
        return CpuAttentionStep(self, items, slots_PN)

    def layers(self, traits: Sequence[LayerTraits]) -> Array[LayerKVC]:
        """Where each layer's keys and values lie, and its sinks: the caller keeps their tensors alive."""
        places = self._pool.places
        layers = (LayerKVC * len(places))()
        for index, ((paged, place), each) in enumerate(zip(places, traits, strict=True)):
            layers[index] = self._layer(paged, place, each.window, each.sinks_H)
        return layers

    def attend(self, step: ItemsC, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        rows, heads, dim = q_NHD.shape
        q_NHD = q_NHD.mul(traits.scale).contiguous()
        kv_NJKD = kv_NJKD.contiguous()
        sinks_H = None if traits.sinks_H is None else traits.sinks_H.float().contiguous()
        value_dim = self._pool.layout.value_dim
        out_NA = torch.empty(rows, heads * value_dim)
        layer_kv = self._layer(*self._pool.places[layer], traits.window, sinks_H)
        if self._workers is None:  # made late: models that run whole steps at once have their own threads
            self._workers = Workers(self._kernels, torch.get_num_threads())
        heads_c = HeadsC(heads, kv_NJKD.shape[2], dim, value_dim)
        outcome = self._kernels.c.kedge_attention_layer(
            self._handle, self._workers.team, byref(step), byref(heads_c), byref(layer_kv),
            q_NHD.data_ptr(), kv_NJKD.data_ptr(), out_NA.data_ptr(),
        )  # fmt: skip
        check(outcome, f"attention over {rows} rows")
        return out_NA

    def fall_back(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> AttentionStep:
        return self._fallback.begin(items, slots_PN)

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    def _layer(self, paged: PagedKV, place: int, window: int | None, sinks_H: Tensor | None) -> LayerKVC:
        assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
        kv_JKSD = paged.kv_LJKSD[place]
        keys_KSD, values_KSD = kv_JKSD[0], kv_JKSD[-1]
        in_window_pool = paged is self._pool.window
        return LayerKVC(
            keys_KSD.data_ptr(), values_KSD.data_ptr(), None if sinks_H is None else sinks_H.data_ptr(),
            keys_KSD.stride(0), in_window_pool, window or 0, paged.num_pages,
        )  # fmt: skip


class CpuAttentionStep:
    """An AttentionStep. Kernels that run all layers at once use the same `items_c`."""

    def __init__(
        self, backend: CpuAttention, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]
    ) -> None:
        self.backend = backend
        self._items = items
        self._slots_PN = slots_PN
        self._fallback: AttentionStep | None = None
        self._array = (ItemC * len(items))()
        row = 0
        for index, item in enumerate(items):
            pages, pages_len = _address(item.pages)
            window_pages, window_len = (None, 0) if item.window_pages is None else _address(item.window_pages)
            self._array[index] = ItemC(
                pages, window_pages, row, item.query_len, item.kv_len, pages_len, window_len
            )
            row += item.query_len
        self.items_c = ItemsC(
            c_void_p(addressof(self._array)), len(items), row, backend.page_size, backend.deterministic
        )

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        if traits.softcap is None:
            return self.backend.attend(self.items_c, layer, q_NHD, kv_NJKD, traits)
        if self._fallback is None:
            self._fallback = self.backend.fall_back(self._items, self._slots_PN)
        return self._fallback(layer, q_NHD, kv_NJKD, traits)


def _address(pages: NDArray[np.int32]) -> tuple[int, int]:
    """The address and length of a dense array that the item keeps alive."""
    array = pages.__array_interface__
    assert array["typestr"] == INT32
    assert array["strides"] is None, "a page table is dense"
    return array["data"][0], len(pages)
