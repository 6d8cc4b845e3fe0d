"""Whether deterministic attention gives a query the same bits in every step: tried at start, on keys like the pool's.

In which order a row is summed is up to the compiler and to the card's matrix units. So a replica that promises equal
bits does not start before it has seen them.

Legend: N rows of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import (
    AttentionItem,
    AttentionUnavailable,
    LayerTraits,
    Queries,
    TableAttention,
)
from engine.attention.prompt_trial import trial_pool
from engine.attention.tables import tables_of
from engine.attention.triton_backend import TritonAttention
from engine.runner.kv_pool import KVPool

TOKENS = 1536
"""Of the sequence that is tried: three splits, and no more pages than they need."""

WINDOW = 700
STEPS = (
    ((1, 1), (1, 65), (1, 511), (1, 512), (1, 513), (1, 1100), (1, TOKENS)),
    ((1, 700), (3, 900), (70, TOKENS)),
    ((TOKENS - 300, TOKENS), (1, 513)),
    ((1024, 1024),),
)
"""New tokens and all tokens of each item. All are beginnings of one sequence: decodes, what is treated like them, and
pieces of a prompt."""

Alike = Callable[[Tensor, Tensor], bool]
Items = Sequence[tuple[int, int]]


def check_bits(
    pool: KVPool,
    queries: Queries,
    attention: Callable[[KVPool, int | None], TableAttention] | None = None,
    steps: Sequence[Items] = STEPS,
    alike: Alike = torch.equal,
) -> None:
    """Compares steps with one pass over the whole sequence, with histories cut into splits and not. Raises
    AttentionUnavailable if a query has other bits, or if a kernel fails. `attention` makes the backend for a pool and a
    number of multiprocessors; the default is Triton's."""
    make = attention or _triton
    try:
        sequence = _Sequence(pool, queries, max(total for step in steps for _, total in step))
        for window in (None,) if pool.window is None else (None, WINDOW):
            sequence.check(make, steps, window, alike)
    except (AttentionUnavailable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of Triton, of the compiler that it calls, or of the driver
        why = f"bits could not be compared: {type(error).__name__}: {error}"
        raise AttentionUnavailable("triton", why) from error


def _triton(pool: KVPool, multiprocessors: int | None) -> TableAttention:
    return TritonAttention(pool, multiprocessors=multiprocessors, deterministic=True)


class _Sequence:
    """Random queries, keys and values of one sequence, and a pool for it."""

    def __init__(self, pool: KVPool, queries: Queries, tokens: int) -> None:
        self._tokens = tokens
        self._pool = trial_pool(pool, tokens)
        kv = self._pool.full.kv_LJKSD
        kv_heads, dim = kv.shape[2], kv.shape[4]
        self._pages = np.random.default_rng(1).permutation(self._pool.num_pages).astype(np.int32)
        generator = torch.Generator(kv.device).manual_seed(1)
        shape = tokens, (queries.group + 2) * kv_heads, dim
        rows_NHD = torch.randn(shape, generator=generator, device=kv.device).to(queries.dtype)
        self._q_NHD, kv_NHD = rows_NHD.tensor_split((queries.group * kv_heads,), 1)
        self._kv_NJKD = kv_NHD.view(tokens, 2, kv_heads, dim)

    def check(
        self,
        make: Callable[[KVPool, int | None], TableAttention],
        steps: Sequence[Items],
        window: int | None,
        alike: Alike,
    ) -> None:
        """Raises AttentionUnavailable."""
        traits = LayerTraits(self._q_NHD.shape[2] ** -0.5, window)
        (expected_NA,) = self._attend(make(self._pool, None), [(self._tokens, self._tokens)], traits)
        for multiprocessors, step in product((None, 1), steps):
            got = self._attend(make(self._pool, multiprocessors), step, traits)
            for (new, total), rows_NA in zip(step, got, strict=True):
                if not alike(rows_NA, expected_NA[total - new : total]):
                    raise AttentionUnavailable(
                        "triton", f"a query has other bits in another step ({new} of {total} tokens)"
                    )

    def _attend(self, attention: TableAttention, items: Items, traits: LayerTraits) -> list[Tensor]:
        """The rows of each item. Each writes the keys and values of its new tokens again: they are the same."""
        size, device = self._pool.page_size, self._q_NHD.device
        slots_N = (self._pages[:, None].astype(np.int64) * size + np.arange(size)).ravel()
        news = [slice(total - new, total) for new, total in items]
        made = [
            AttentionItem(new, total, self._pages[: -(-total // size)], contiguous=False)
            for new, total in items
        ]
        slots = torch.from_numpy(np.concatenate([slots_N[new] for new in news])).to(device)
        step = attention.plan(tables_of(made, [slots], device))
        q_NHD = torch.cat([self._q_NHD[new] for new in news])
        kv_NJKD = torch.cat([self._kv_NJKD[new] for new in news])
        out_NA = step(0, q_NHD, kv_NJKD, traits)
        bounds = np.cumsum([0, *(new for new, _ in items)]).tolist()
        return [out_NA[begin:end] for begin, end in pairwise(bounds)]
