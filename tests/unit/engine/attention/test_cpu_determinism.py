"""With `deterministic` the compiled attention gives a query the same bits, whatever else a step holds, in every build
that runs here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import LayerTraits
from engine.runner.kv_pool import KVLayout, KVPool
from tests.unit.engine.attention.chunked_sequences import ChunkedSequences
from tests.unit.engine.cpu.builds import every_build, kernels_of

LENGTHS = (600, 9, 70)
"""Of sequences that are attended to together. The longest is so long that threads would share its keys."""

LAST = 90
"""Number of a sequence's last tokens that come in small chunks: a step for each of all would take long."""


@pytest.mark.parametrize(
    ("window", "sinks"), [(None, False), (20, False), (100, False), (None, True), (20, True)]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "latent_dim"),
    [(4, 2, 64, None), (3, 3, 20, None), (9, 1, 16, None), (20, 1, 40, 24)],
)
@every_build
def test_a_query_has_the_same_bits_in_every_step(
    variant: str,
    heads: int,
    kv_heads: int,
    dim: int,
    latent_dim: int | None,
    window: int | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With sinks each page size has the other number of threads than without."""
    kernels, random = kernels_of(variant), np.random.default_rng(dim)
    traits = LayerTraits(0.25, window, sinks_H=torch.linspace(-3, 9, heads) if sinks else None)
    sequences = ChunkedSequences(LENGTHS, heads, KVLayout(kv_heads, dim, (None,), latent_dim), traits)

    def make(pool: KVPool) -> CpuAttention:
        return CpuAttention(pool, kernels, deterministic=True)

    expected = sequences.alone(make, 256)
    assert all(each.isfinite().all() for each in expected)
    for number, page_size in enumerate((1, 4, 16, 256)):
        threads = (1, 3)[(number + sinks) % 2]
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        got = sequences.in_chunks(make, page_size, int(random.choice([1, 4, 60])), random, LAST)
        assert all(map(torch.equal, got, expected)), f"pages of {page_size}, {threads} threads"
