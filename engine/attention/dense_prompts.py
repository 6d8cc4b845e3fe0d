"""Attention of prompts by a library's kernels over contiguous keys and values, where they are faster than our own over
pages.

FlashAttention 3 (Shah et al., 2024) overlaps products with the softmax as Triton cannot express it, but the build that
installs from PyPI (fa3-fwd) reads no pages. A prompt's work grows with its rows times its keys, a copy of the keys only
with the keys. So from some hundred rows on it pays to copy an item's pages together first.

Legend: N rows of the step, B items, T tokens of a run's items one after another, M pages of the longest item, H query
heads, K key/value heads, D head size, S slots.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.attention.interface import AttentionTables, AttentionUnavailable, ItemLens, LayerTraits
from engine.kernels.gather_kv import gather_kv
from engine.runner.kv_pool import FP8, KVPool, PagedKV

MODULES = ("flash_attn_interface", "fa3_fwd_interface")
"""FlashAttention 3 as its authors build it, and as PyPI has it."""

NEEDED = frozenset(
    ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
)
NEEDED_TRAITS = frozenset(("causal", "softcap"))

LEAST_ROWS = 1024
"""Rows (queries times the heads that share a key head) for each key, in the mean, from which a copy of the key pays. On
an H200 a key of eight heads of 128 takes 2 ns to copy, and a row of four heads 18 ps less than in our kernel."""

WORKSPACE_TOKENS = 2**17
"""Tokens that are copied together at a time: 512 MiB with eight heads of 128 numbers in bfloat16."""

BLOCK_ELEMENTS = 8192
"""Numbers that a program of the copy moves."""


@dataclass(frozen=True, slots=True)
class FlashPrompts:
    """`flash_attn_varlen_func` of the module `source`."""

    call: Callable[..., Any]
    source: str


def find_flash_prompts() -> FlashPrompts:
    """The first build that can be imported and has the arguments that are needed. Raises AttentionUnavailable."""
    reasons = []
    for source in MODULES:
        try:
            call = importlib.import_module(source).flash_attn_varlen_func
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reasons.append(f"{source}: {error}")
            continue
        missing = sorted((NEEDED | NEEDED_TRAITS) - set(inspect.signature(call).parameters))
        if not missing:
            return FlashPrompts(call, source)
        reasons.append(f"{source} does not take {', '.join(missing)}")
    raise AttentionUnavailable("flash prompts", "; ".join(reasons))


@dataclass(frozen=True, slots=True)
class Run:
    """Items `first` .. `end` - 1 of a step, which stand one behind another and are attended to by one call."""

    first: int
    end: int
    first_row: int
    end_row: int
    most_queries: int
    most_keys: int
    keys: int


class DensePrompts:
    """Copies keys and values of a run's items to its workspace, and attends to them there. Steps of one object run one
    after another on one stream.

    Raises AttentionUnavailable for pools whose keys the function cannot multiply.
    """

    def __init__(
        self,
        pool: KVPool,
        flash: FlashPrompts,
        workspace_tokens: int = WORKSPACE_TOKENS,
        least_rows: int = LEAST_ROWS,
    ) -> None:
        kv_LJKSD = pool.full.kv_LJKSD
        _, _, kv_heads, _, dim = kv_LJKSD.shape
        if kv_LJKSD.dtype not in (torch.bfloat16, FP8):
            raise AttentionUnavailable("flash prompts", f"it multiplies bfloat16, the KV is {kv_LJKSD.dtype}")
        self._call = flash.call
        self._page_size = pool.page_size
        self._tokens = workspace_tokens
        self._least_rows = least_rows
        self._dense_2KTD = torch.empty(
            (2, kv_heads, workspace_tokens, dim), dtype=torch.bfloat16, device=kv_LJKSD.device
        )

    def takes(self, q_NHD: Tensor, traits: LayerTraits) -> bool:
        return q_NHD.dtype == torch.bfloat16 and traits.window is None and traits.sinks_H is None

    def runs(self, lens: Sequence[ItemLens], group: int, few_rows: int) -> list[Run]:
        """The items of more than `few_rows` rows, by runs that the workspace holds. None at all if the copies would not
        pay, or if an item is longer than the workspace."""
        many = [each for each in lens if each.queries * group > few_rows]
        keys = sum(each.keys for each in many)
        work = sum(each.queries * group * each.keys for each in many)
        if work < self._least_rows * keys or any(each.keys > self._tokens for each in many):
            return []
        runs: list[Run] = []
        row = 0
        for index, each in enumerate(lens):
            if each.queries * group > few_rows:
                self._append(
                    runs, Run(index, index + 1, row, row + each.queries, each.queries, each.keys, each.keys)
                )
            row += each.queries
        return runs

    def _append(self, runs: list[Run], new: Run) -> None:
        last = runs[-1] if runs else None
        if last is None or last.end != new.first or last.keys + new.keys > self._tokens:
            runs.append(new)
            return
        runs[-1] = Run(
            last.first, new.end, last.first_row, new.end_row, max(last.most_queries, new.most_queries),
            max(last.most_keys, new.most_keys), last.keys + new.keys,
        )  # fmt: skip

    def plan(self, tables: AttentionTables, run: Run) -> DenseRun:
        """Reads the tables, once for all layers of a pass."""
        starts_B1 = tables.query_starts_B1[run.first : run.end + 1]
        kv_lens_B = tables.kv_lens_B[run.first : run.end]
        key_starts_B1 = torch.nn.functional.pad(kv_lens_B.cumsum(0, dtype=torch.int32), (1, 0))
        return DenseRun(run, starts_B1 - starts_B1[:1], kv_lens_B, key_starts_B1)

    def attend(
        self,
        planned: DenseRun,
        q_NHD: Tensor,
        paged: PagedKV,
        place: int,
        pages_BM: Tensor,
        traits: LayerTraits,
    ) -> Tensor:
        """The run's rows, [rows, H, D]."""
        run = planned.run
        self._gather(planned, paged, place, pages_BM[run.first : run.end])
        k_TKD, v_TKD = self._dense_2KTD[:, :, : run.keys].transpose(1, 2).unbind(0)
        out: Tensor = self._call(
            q=q_NHD[run.first_row : run.end_row],
            k=k_TKD,
            v=v_TKD,
            cu_seqlens_q=planned.query_starts_B1,
            cu_seqlens_k=planned.key_starts_B1,
            max_seqlen_q=run.most_queries,
            max_seqlen_k=run.most_keys,
            softmax_scale=traits.scale,
            causal=True,
            softcap=traits.softcap or 0.0,
        )
        return out

    def _gather(self, planned: DenseRun, paged: PagedKV, place: int, pages_BM: Tensor) -> None:
        kv_2KSD, scales = paged.kv_LJKSD[place], paged.scales_LJKS
        _, kv_heads, _, dim = kv_2KSD.shape
        block_d = triton.next_power_of_2(dim)
        block_t = max(16, BLOCK_ELEMENTS // block_d)
        run = planned.run
        gather_kv[(triton.cdiv(run.most_keys, block_t), run.end - run.first, 2 * kv_heads)](
            self._dense_2KTD,
            kv_2KSD,
            kv_2KSD if scales is None else scales[place],
            pages_BM,
            planned.kv_lens_B,
            planned.key_starts_B1,
            self._dense_2KTD.stride(1),
            kv_2KSD.stride(1),
            pages_BM.stride(0),
            PAGE_SIZE=self._page_size,
            DIM=dim,
            BLOCK_D=block_d,
            BLOCK_T=block_t,
            HAS_SCALES=scales is not None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DenseRun:
    """A run with its tensors on the device: where each item's queries and keys begin, int32."""

    run: Run
    query_starts_B1: Tensor
    kv_lens_B: Tensor
    key_starts_B1: Tensor
