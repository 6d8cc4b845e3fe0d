"""Attention with the flash-attention kernels that vllm ships, over pages where they lie.

Two builds are known: `vllm.vllm_flash_attn`, inside vllm, and the older package `vllm_flash_attn`. Their function
`flash_attn_varlen_func` takes paged keys and values with a `block_table`, but with different signatures. The arguments
depend on the build that is found.

Masked keys are multiplied by weights of zero in blocks of up to BLOCK tokens, so their memory must hold finite numbers.
Therefore the pools are zeroed once, and dead or missing entries of a page table are replaced by the item's own last
page.

Legend: P pages of a pool, p tokens of a page, N tokens of the step, B items, M pages of the longest, H query heads, K
key/value heads, D head size, S slots, A = H * D.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.interface import AttentionStep, AttentionTables, AttentionUnavailable, LayerTraits
from engine.runner.kv_pool import KVPool, PagedKV

MODULES = ("vllm.vllm_flash_attn", "vllm_flash_attn")
BLOCK = 256
"""The most keys that a kernel reads as one block: it looks up pages that far past an item's end."""

MAX_HEAD_DIM = 256
MAX_SINK_HEADS = 64
_NEEDED = frozenset(("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "block_table"))
_NEEDED_TRAITS = frozenset(("softmax_scale", "causal", "window_size", "softcap"))


@dataclass(frozen=True, slots=True)
class FlashFunction:
    """`flash_attn_varlen_func` of the module `source`. `version` is passed as fa_version; None if there is no such
    argument."""

    call: Callable[..., Any]
    source: str
    version: int | None
    takes: frozenset[str]

    @property
    def takes_sinks(self) -> bool:
        """Versions 2 and older do not take sinks."""
        return "s_aux" in self.takes and self.version == 3


def find_flash() -> FlashFunction:
    """The first build that can be imported. Raises AttentionUnavailable if there is none that this GPU can run."""
    reasons = []
    for source in MODULES:
        try:
            module = importlib.import_module(source)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{source}: {error}")
        else:
            supports = getattr(module, "is_fa_version_supported", None)
            return read_function(module.flash_attn_varlen_func, source, supports)
    raise AttentionUnavailable("flash", "; ".join(reasons))


def read_function(
    call: Callable[..., Any], source: str, supports: Callable[[int], bool] | None = None
) -> FlashFunction:
    """Reads the function's signature. `supports` says which fa_version runs on this GPU. Raises AttentionUnavailable if
    the function cannot do what is needed here."""
    takes = frozenset(inspect.signature(call).parameters)
    missing = sorted((_NEEDED | _NEEDED_TRAITS) - takes)
    if not takes & {"seqused_k", "cu_seqlens_k"}:
        missing.append("seqused_k")
    if missing:
        raise AttentionUnavailable("flash", f"{source} does not take {', '.join(missing)}")
    if "fa_version" not in takes:
        return FlashFunction(call, source, None, takes)
    versions = [version for version in (3, 2) if supports is None or supports(version)]
    if not versions:
        raise AttentionUnavailable("flash", f"{source} has no version for this GPU")
    return FlashFunction(call, source, versions[0], takes)


class KVWriter(Protocol):
    def __call__(self, paged: PagedKV, place: int, kv_NJKD: Tensor, slots_N: Tensor, /) -> None:
        """Writes row n to slot `slots_N[n]` of the pool's layer `place`, or nowhere if that is negative."""


class FlashAttention:
    """A TableAttention. Zeroes the pools, so nothing may have been written to them. Without a writer, torch's operators
    write.

    Raises AttentionUnavailable if the function cannot read such pools, or does not take attention sinks of as many
    heads as the model's layers have (`sinks`).
    """

    name = "flash"

    def __init__(
        self, pool: KVPool, flash: FlashFunction, sinks: int = 0, write: KVWriter | None = None
    ) -> None:
        kv, size = pool.full.kv_LJKSD, pool.page_size
        dim = kv.shape[-1]
        if kv.dtype not in (torch.float16, torch.bfloat16):
            raise AttentionUnavailable(self.name, f"it takes float16 and bfloat16, the KV is {kv.dtype}")
        if size % 16:
            raise AttentionUnavailable(self.name, f"page_size must be a multiple of 16, it is {size}")
        if dim % 8 or dim > MAX_HEAD_DIM:
            raise AttentionUnavailable(
                self.name, f"heads must be multiples of 8 up to {MAX_HEAD_DIM} numbers, they have {dim}"
            )
        if sinks and not flash.takes_sinks:
            raise AttentionUnavailable(self.name, _no_sinks(flash))
        if sinks > MAX_SINK_HEADS:
            raise AttentionUnavailable(
                self.name, f"it has sinks for up to {MAX_SINK_HEADS} heads, not {sinks}"
            )
        self._flash = flash
        self._page_size = size
        self._write = write
        for paged in (pool.full, pool.window):
            if paged is not None:
                paged.kv_LJKSD.zero_()
        self._layers = [_LayerKV.of(paged, place, int(paged is pool.window)) for paged, place in pool.places]

    def captures(self, max_query_len: int) -> bool:  # noqa: ARG002
        """Always: launches depend only on shapes and the tables' bounds; lengths and pages are read on the device."""
        return True

    def plan(self, tables: AttentionTables) -> AttentionStep:
        return _FlashStep(self._flash, self._layers, self._page_size, self._write, tables)


@dataclass(frozen=True, slots=True)
class _LayerKV:
    """One layer's memory, layer `place` of `paged`, arranged by page for reading; `row` is the pool's index."""

    row: int
    paged: PagedKV
    place: int
    k_PpKD: Tensor
    v_PpKD: Tensor

    @staticmethod
    def of(paged: PagedKV, place: int, row: int) -> _LayerKV:
        _, kv_heads, _, dim = paged.kv_LJKSD[place].shape
        shape = (kv_heads, paged.num_pages, paged.page_size, dim)
        k_PpKD, v_PpKD = (part_KSD.view(shape).permute(1, 2, 0, 3) for part_KSD in paged.kv_LJKSD[place])
        return _LayerKV(row, paged, place, k_PpKD, v_PpKD)


@dataclass(frozen=True, slots=True)
class _Writes:
    """Where a step's rows go in one pool. A row that goes nowhere repeats one that does, so that each slot is written
    with one content only. If no row goes anywhere, a slot is written with what it already holds."""

    slots_N: Tensor
    rows_N: Tensor
    any_live: Tensor

    @staticmethod
    def of(slots_N: Tensor) -> _Writes:
        live_N = slots_N >= 0
        first_1 = live_N.int().argmax(0, keepdim=True)
        rows_N = torch.where(live_N, torch.arange(len(slots_N), device=slots_N.device), first_1)
        return _Writes(slots_N[rows_N].clamp_min(0), rows_N, live_N.any())

    def write(self, slots_S2KD: Tensor, kv_NJKD: Tensor) -> None:
        """Writes to one layer, by slot."""
        kept_N2KD = slots_S2KD.index_select(0, self.slots_N)
        written_N2KD = torch.where(self.any_live, kv_NJKD.index_select(0, self.rows_N), kept_N2KD)
        slots_S2KD.index_copy_(0, self.slots_N, written_N2KD)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one pass share, derived from the tables on the device. Torch's operators use `writes`."""

    writes: list[_Writes]
    pages: list[Tensor]
    lengths: dict[str, Tensor]

    @staticmethod
    def of(tables: AttentionTables, page_size: int, takes: frozenset[str], *, with_writes: bool) -> _Pass:
        lengths = {"seqused_k": tables.kv_lens_B}
        if "seqused_k" not in takes:
            starts_B1 = torch.nn.functional.pad(tables.kv_lens_B.cumsum(0, dtype=torch.int32), (1, 0))
            lengths = {"cu_seqlens_k": starts_B1}
        return _Pass(
            [_Writes.of(slots_N) for slots_N in tables.slots_PN] if with_writes else [],
            [_whole_table(pages_BM, tables.kv_lens_B, page_size) for pages_BM in tables.pages_PBM],
            lengths,
        )


class _FlashStep:
    """An AttentionStep. A pass is derived anew at its first layer, since the tables may have changed."""

    def __init__(
        self,
        flash: FlashFunction,
        layers: list[_LayerKV],
        page_size: int,
        write: KVWriter | None,
        tables: AttentionTables,
    ) -> None:
        self._flash = flash
        self._layers = layers
        self._page_size = page_size
        self._write_rows = write
        self._tables = tables
        self._version = {} if flash.version is None else {"fa_version": flash.version}
        self._last_layer = len(layers)

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        kv, tables = self._layers[layer], self._tables
        if layer <= self._last_layer:
            takes, with_writes = self._flash.takes, self._write_rows is None
            self._pass = _Pass.of(tables, self._page_size, takes, with_writes=with_writes)
        self._last_layer = layer
        if self._write_rows is None:
            self._pass.writes[kv.row].write(kv.paged.layer(kv.place), kv_NJKD)
        else:
            self._write_rows(kv.paged, kv.place, kv_NJKD, tables.slots_PN[kv.row])
        out_NHD: Tensor = self._flash.call(
            q=q_NHD,
            k=kv.k_PpKD,
            v=kv.v_PpKD,
            cu_seqlens_q=tables.query_starts_B1,
            max_seqlen_q=self._query_bound(len(q_NHD)),
            max_seqlen_k=tables.max_kv_len,
            softmax_scale=traits.scale,
            causal=True,
            window_size=(-1, -1) if traits.window is None else (traits.window - 1, 0),
            softcap=traits.softcap or 0.0,
            block_table=self._pass.pages[kv.row],
            **self._pass.lengths,
            **self._version,
            **self._sinks(traits.sinks_H),
        )
        return out_NHD.flatten(1)

    def _query_bound(self, rows: int) -> int:
        """Given a bound of 1, some versions take row b for item b, whatever the starts say."""
        bound = self._tables.max_query_len
        return bound if rows == len(self._tables.kv_lens_B) else max(2, bound)

    def _sinks(self, sinks_H: Tensor | None) -> dict[str, Tensor]:
        if sinks_H is None:
            return {}
        return {"s_aux": sinks_H.to(torch.bfloat16).contiguous()}


def _whole_table(pages_BM: Tensor, kv_lens_B: Tensor, page_size: int) -> Tensor:
    """The table with valid pages wherever the kernels may look: the item's last page where there is none."""
    width = pages_BM.shape[1]
    last_B1 = ((kv_lens_B - 1) // page_size).clamp(0, width - 1)[:, None]
    own_B1 = pages_BM.gather(1, last_B1.long()).clamp_min(0)
    return torch.cat(
        (torch.where(pages_BM < 0, own_B1, pages_BM), own_B1.expand(-1, -(-BLOCK // page_size))), dim=1
    )


def _no_sinks(flash: FlashFunction) -> str:
    return f"the model has attention sinks, which only version 3 takes; {flash.source} runs {flash.version or 2} here"
