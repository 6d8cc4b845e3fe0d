"""Whether prompts are left to a library's kernels: tried at start beside our own, on the pool's kind of keys.

Legend: N rows of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense_prompts import DensePrompts, FlashPrompts, find_flash_prompts
from engine.attention.interface import AttentionItem, AttentionUnavailable, LayerTraits
from engine.attention.tables import tables_of
from engine.attention.triton_backend import TritonAttention
from engine.device import compute_capability, seconds_of_each
from engine.runner.kv_pool import FP8, KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings

TOKENS = 8192
"""Of the prompt that is tried."""

FILLS = 40
"""As seconds_of_each takes them: 2.4 ms on an H200, where a slow host took 0.9 to launch the library's way."""

LAYERS = 2
"""The first layer of a step also cuts it, the others do not: the last is timed."""

GROUP = 4
"""Query heads of a key head. The pool does not know the model's; with more, a library gains no less."""

BETTER = 0.9
"""The library must take at most this share of our time."""

MOST_APART = 0.02
"""The most by which results may differ, as a share of their norm."""

FIRST_WITHOUT_FLASH = 100
"""FlashAttention 3 has kernels for the compute capabilities 8.x and 9.x. On later cards a launch fails, and its code
then ends the process (CHECK_CUDA in its cuda_check.h): nothing could be caught."""

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]


def try_prompts(
    pool: KVPool, sinks: int = 0, timer: Timer | None = None, tokens: int = TOKENS
) -> tuple[DensePrompts | None, str]:
    """What prompts over the pool are left to, and a clause that says why. None: to our own kernels. `sinks` is the
    number of heads with attention sinks in the model's layers."""
    device = pool.full.kv_LJKSD.device
    if sinks or not pool.full.kv_LJKSD.shape[0]:
        trait = "attention sinks" if sinks else "a window"
        return None, f"prompts too, as no library's kernels are for layers with {trait}"
    capability = compute_capability(device)
    if capability is not None and capability >= FIRST_WITHOUT_FLASH:
        return None, f"prompts too, as no library's kernels are for compute capability {capability / 10}"
    try:
        flash = find_flash_prompts()
        share = _share_of_ours(pool, flash, timer or partial(seconds_of_each, device, fills=FILLS), tokens)
    except AttentionUnavailable as error:
        return None, f"prompts too, as no library's kernels can run: {error.why}"
    except Exception as error:  # whatever a library's kernels raise on a GPU that they do not know
        return None, f"prompts too, as a library's kernels failed: {type(error).__name__}: {error}"
    if share > BETTER:
        return None, f"prompts too, as {flash.source} takes {share:.2f} of the time"
    return DensePrompts(pool, flash), f"prompts by {flash.source} in {share:.2f} of the time"


def _share_of_ours(pool: KVPool, flash: FlashPrompts, timer: Timer, tokens: int) -> float:
    """The library's time as a share of ours, with its copy of the keys. Raises AttentionUnavailable for other
    results."""
    trial = trial_pool(pool, tokens)
    kv, size = trial.full.kv_LJKSD, trial.page_size
    kv_heads, dim = kv.shape[2], kv.shape[4]
    pages = np.random.default_rng(1).permutation(trial.num_pages).astype(np.int32)
    slots = (pages[:, None].astype(np.int64) * size + np.arange(size)).ravel()[:tokens]
    item = AttentionItem(tokens, tokens, pages, contiguous=False)
    tables = tables_of([item], [torch.from_numpy(slots).to(kv.device)], kv.device)
    generator = torch.Generator(kv.device).manual_seed(1)
    shape = tokens, (GROUP + 2) * kv_heads, dim
    rows_NHD = torch.randn(shape, generator=generator, device=kv.device).bfloat16()
    q_NHD, kv_NHD = rows_NHD.tensor_split((GROUP * kv_heads,), 1)
    kv_NJKD, traits = kv_NHD.view(tokens, 2, kv_heads, dim), LayerTraits(dim**-0.5)
    dense = DensePrompts(trial, flash, tokens, least_rows=0)
    steps = [TritonAttention(trial).plan(tables), TritonAttention(trial, prompts=dense).plan(tables)]

    def result(index: int, layer: int = LAYERS - 1) -> Tensor:
        return steps[index](layer, q_NHD, kv_NJKD, traits)

    ours_NA, other_NA = result(0, layer=0).float(), result(1, layer=0).float()
    if not bool((other_NA - ours_NA).norm() <= MOST_APART * ours_NA.norm()):
        raise AttentionUnavailable("flash prompts", "other results")
    ours_s, other_s = timer([partial(result, 0), partial(result, 1)])
    return other_s / ours_s


def trial_pool(pool: KVPool, tokens: int) -> KVPool:
    """A pool for one sequence, with keys like those of `pool`, and no windows."""
    kv = pool.full.kv_LJKSD
    settings = CacheSettings(
        page_size=pool.page_size,
        num_pages=-(-tokens // pool.page_size),
        kv_dtype="fp8" if kv.dtype == FP8 else "auto",
    )
    layout = KVLayout(kv.shape[2], kv.shape[4], (None,) * LAYERS)
    dtype = torch.bfloat16 if kv.dtype == FP8 else kv.dtype
    return make_kv_pool(layout, settings, dtype, kv.device)
