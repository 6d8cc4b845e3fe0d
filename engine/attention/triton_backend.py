"""Attention with Kedge's own Triton kernels: one launch writes a layer's keys and values, one or two attend.

Items of few rows (decodes) and of many (prompts, beside them in the same step) are attended to by a launch each, with
tiles of their own size. One launch for each of these cuts a step into parts: for each window, before its first layer.
Prompts may be left to a library's kernels (`prompts`) in steps whose lengths the host knows.

Legend: N rows of the step, B items, M pages of the longest, H query heads, K key/value heads, D head size, S slots, A =
H * D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.dense_prompts import DensePrompts, DenseRun
from engine.attention.interface import (
    AttentionStep,
    AttentionTables,
    AttentionUnavailable,
    KVTarget,
    LayerTraits,
)
from engine.attention.kv_writer import write_rows
from engine.attention.parts import PartCutter, Parts
from engine.attention.tiles import AttentionTiles, default_tiles, deterministic_tiles
from engine.device import compute_capability, num_multiprocessors
from engine.kernels.choose import FIRST_WITH_FP8
from engine.kernels.paged_attention import paged_attention
from engine.runner.kv_pool import FP8, KVPool, PagedKV

MAX_HEAD_DIM = 256
LOG2_E = math.log2(math.e)
WIDE_ELEMENTS = 2**31
"""From this many numbers of one head in a layer's pool on, offsets need 64 bits."""

JOIN_ELEMENTS = 512
"""Numbers of a tile's output that a warp holds while it joins splits."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonAttention:
    """A TableAttention. Steps of one object run one after another on one stream: they share its workspace.

    The number of `multiprocessors` decides how far long contexts are split; the default is the GPU's own. If
    `deterministic`, tiles are such that a row's result does not depend on what else a step holds. Raises
    AttentionUnavailable for pools that the kernels cannot read.
    """

    def __init__(
        self,
        pool: KVPool,
        tiles: AttentionTiles | None = None,
        multiprocessors: int | None = None,
        prompts: DensePrompts | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        kv_LJKSD = pool.full.kv_LJKSD
        self.device = kv_LJKSD.device
        self.head_dim = kv_LJKSD.shape[4]
        capability = compute_capability(self.device)
        _check(self.head_dim, kv_LJKSD.dtype, capability)
        self.pool = pool
        self.prompts = prompts
        self.block_d = max(16, triton.next_power_of_2(self.head_dim))
        choose_tiles = deterministic_tiles if deterministic else default_tiles
        self.tiles = tiles or choose_tiles(self.head_dim, kv_LJKSD.dtype, capability)
        self.multiprocessors = multiprocessors or num_multiprocessors(self.device)
        # Tiles are split into at most this many parts.
        programs = [self.multiprocessors * shape.programs for shape in self.tiles.shapes]
        rows = [n * shape.block_m for n, shape in zip(programs, self.tiles.shapes, strict=True)]
        self.partials = torch.empty(max(rows) * self.block_d, device=self.device)
        self.sums = torch.empty(2 * max(rows), device=self.device)
        self.counters = torch.zeros(max(programs), dtype=torch.int32, device=self.device)

    def captures(self, max_query_len: int) -> bool:  # noqa: ARG002
        return True

    def plan(self, tables: AttentionTables) -> AttentionStep:
        return TritonStep(self, tables)


class TritonStep:
    """An OpenStep."""

    def __init__(self, attention: TritonAttention, tables: AttentionTables) -> None:
        self._attention = attention
        self._tables = tables
        self._cutter = PartCutter(attention.tiles, attention.multiprocessors, tables)
        self._parts: dict[tuple[int, int, int | None, bool], Sequence[Parts]] = {}
        self._dense: dict[int, list[DenseRun]] = {}

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        target = self.target(layer)
        write_rows(target.paged, target.place, kv_NJKD, target.slots_N)
        return self.attend(layer, q_NHD, traits)

    def target(self, layer: int) -> KVTarget:
        pool = self._attention.pool
        paged, place = pool.places[layer]
        return KVTarget(paged, place, self._tables.slots_PN[int(paged is pool.window)])

    def attend(self, layer: int, q_NHD: Tensor, traits: LayerTraits) -> Tensor:
        pool = self._attention.pool
        paged, place = pool.places[layer]
        if not layer:
            self._parts.clear()  # the tables may hold other contents than in the pass before
            self._dense.clear()
        pages_BM = self._tables.pages_PBM[int(paged is pool.window)]
        pages_BM = pages_BM if pages_BM.stride(1) == 1 else pages_BM.contiguous()
        q_NHD = q_NHD if q_NHD.stride(2) == 1 else q_NHD.contiguous()
        return self._attend(paged, place, q_NHD, pages_BM, traits)

    def _attend(
        self, paged: PagedKV, place: int, q_NHD: Tensor, pages_BM: Tensor, traits: LayerTraits
    ) -> Tensor:
        rows, heads, dim = q_NHD.shape
        out_NA = torch.empty((rows, heads * dim), dtype=q_NHD.dtype, device=q_NHD.device)
        kv_2KSD, scales = paged.kv_LJKSD[place], paged.scales_LJKS
        kv_heads = kv_2KSD.shape[1]
        group = heads // kv_heads
        dense = self._dense_runs(q_NHD, group, traits)
        key = kv_heads, group, traits.window, bool(dense)
        if key not in self._parts and not self._all_in(dense):
            most_keys = pages_BM.shape[1] * paged.page_size
            self._parts[key] = self._cutter.cut(rows, *key[:3], most_keys, few=bool(dense))
        for parts in self._parts.get(key, ()):
            self._launch(
                parts, out_NA, q_NHD, kv_2KSD, None if scales is None else scales[place], pages_BM, traits
            )
        for planned in dense:
            assert self._attention.prompts is not None
            run_RHD = self._attention.prompts.attend(planned, q_NHD, paged, place, pages_BM, traits)
            if len(run_RHD) == rows:
                return run_RHD.flatten(1)
            out_NA[planned.run.first_row : planned.run.end_row] = run_RHD.flatten(1)
        return out_NA

    def _dense_runs(self, q_NHD: Tensor, group: int, traits: LayerTraits) -> list[DenseRun]:
        """The prompts that are left to a library in a layer like this; most often none."""
        prompts, lens = self._attention.prompts, self._tables.lens
        if prompts is None or lens is None or not prompts.takes(q_NHD, traits):
            return []
        if group not in self._dense:
            runs = prompts.runs(lens, group, self._cutter.few_rows(group))
            self._dense[group] = [prompts.plan(self._tables, run) for run in runs]
        return self._dense[group]

    def _all_in(self, dense: list[DenseRun]) -> bool:
        return sum(each.run.end - each.run.first for each in dense) == len(self._tables.kv_lens_B)

    def _launch(
        self,
        parts: Parts,
        out_NA: Tensor,
        q_NHD: Tensor,
        kv_2KSD: Tensor,
        scales_2KS: Tensor | None,
        pages_BM: Tensor,
        traits: LayerTraits,
    ) -> None:
        attention, tables, shape = self._attention, self._tables, parts.shape
        _, heads, dim = q_NHD.shape
        kv_heads, num_slots = kv_2KSD.shape[1], kv_2KSD.shape[2]
        score_scale, cap, factor = _score_constants(traits)
        paged_attention[(parts.most * kv_heads,)](
            out_NA,
            q_NHD,
            kv_2KSD,
            kv_2KSD if scales_2KS is None else scales_2KS,
            pages_BM,
            tables.query_starts_B1,
            tables.kv_lens_B,
            *parts.tensors,
            q_NHD if traits.sinks_H is None else traits.sinks_H,
            attention.partials,
            attention.sums,
            attention.counters,
            len(tables.kv_lens_B),
            q_NHD.stride(0),
            q_NHD.stride(1),
            kv_2KSD.stride(0),
            kv_2KSD.stride(1),
            pages_BM.stride(0),
            score_scale,
            cap,
            traits.window or 0,
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            DIM=dim,
            BLOCK_D=attention.block_d,
            PAGE_SIZE=attention.pool.page_size,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            JOIN_D=min(attention.block_d, JOIN_ELEMENTS * shape.num_warps // shape.block_m),
            MAX_SPLITS=parts.max_splits,
            MIN_BLOCKS=attention.tiles.least_blocks(shape),
            SPLIT_BLOCKS=attention.tiles.split_blocks,
            Q_FACTOR=factor,
            COMPUTE=_compute_dtype(q_NHD, kv_2KSD),
            SCORES=_scores_dtype(q_NHD, kv_2KSD),
            HAS_SCALES=scales_2KS is not None,
            HAS_CAP=traits.softcap is not None,
            HAS_WINDOW=traits.window is not None,
            HAS_SINKS=traits.sinks_H is not None,
            WIDE=num_slots * dim >= WIDE_ELEMENTS,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _check(head_dim: int, dtype: torch.dtype, capability: int | None) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise AttentionUnavailable("triton", f"heads of {head_dim} are larger than {MAX_HEAD_DIM}")
    if dtype == FP8 and capability is not None and capability < FIRST_WITH_FP8:
        raise AttentionUnavailable(
            "triton",
            f"a KV cache in fp8 needs compute capability {FIRST_WITH_FP8 / 10}, not {capability / 10}",
        )
    if dtype != FP8 and dtype not in _DTYPES:
        raise AttentionUnavailable("triton", f"it has no kernels for a KV cache in {dtype}")


def _score_constants(traits: LayerTraits) -> tuple[float, float, int]:
    """The kernel's score_scale, cap and Q_FACTOR. The kernel's scale is positive; the sign is applied to the
    queries."""
    factor = (traits.scale > 0) - (traits.scale < 0)
    scale = abs(traits.scale) if factor else 1.0
    if traits.softcap is None:
        return scale * LOG2_E, 0.0, factor
    return 2 * scale / traits.softcap * LOG2_E, traits.softcap * LOG2_E, factor


def _compute_dtype(q_NHD: Tensor, kv_2KSD: Tensor) -> Any:
    """The dtype of products. Keys in fp8 become bfloat16, whose range covers every scale; the interpreter multiplies
    bfloat16 in float32."""
    dtype = q_NHD.dtype
    if dtype != torch.float32 and kv_2KSD.dtype == FP8:
        dtype = torch.bfloat16
    if dtype == torch.bfloat16 and q_NHD.device.type == "cpu":
        dtype = torch.float32
    return _DTYPES[dtype]


def _scores_dtype(q_NHD: Tensor, kv_2KSD: Tensor) -> Any:
    """The dtype of queries and keys: float16 can hold every fp8 key, and queries once they are scaled."""
    if q_NHD.dtype != torch.float32 and kv_2KSD.dtype == FP8:
        return tl.float16
    return _compute_dtype(q_NHD, kv_2KSD)
