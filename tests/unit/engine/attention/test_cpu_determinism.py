"""With `deterministic` the compiled attention gives a query the same bits, whatever else a step holds, in every build
that runs here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionItem, LayerTraits
from engine.cpu.library import Kernels
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.cpu.builds import every_build, kernels_of

LENGTHS = (600, 9, 70)
"""Of sequences that are attended to together. The longest is so long that threads would share its keys."""

LAST = 90
"""Number of a sequence's last tokens that come in small chunks. All before them come in one."""


class Sequences:
    """Queries, keys and values of all LENGTHS."""

    def __init__(self, heads: int, kv_heads: int, dim: int, latent_dim: int | None) -> None:
        random = torch.Generator().manual_seed(heads + dim)
        self.layout = KVLayout(kv_heads, dim, (None,), latent_dim)
        vectors = self.layout.num_vectors
        self.q = [2 * torch.randn(length, heads, dim, generator=random) for length in LENGTHS]
        self.kv = [torch.randn(length, vectors, kv_heads, dim, generator=random) for length in LENGTHS]

    def pool(self, page_size: int, num_pages: int) -> KVPool:
        pool = make_kv_pool(
            self.layout, CacheSettings(page_size, num_pages), torch.float32, torch.device("cpu")
        )
        pool.full.kv_LJKSD.fill_(torch.nan)
        return pool

    def alone(self, kernels: Kernels, traits: LayerTraits) -> list[Tensor]:
        """Each sequence in one pass of its own, over pages that follow one another."""
        outputs = []
        for length, q_NHD, kv_NJKD in zip(LENGTHS, self.q, self.kv, strict=True):
            backend = CpuAttention(self.pool(256, 3), kernels, deterministic=True)
            step = backend.begin(
                [AttentionItem(length, length, np.arange(3, dtype=np.int32), True)],
                torch.arange(length)[None],
            )
            outputs.append(step(0, q_NHD, kv_NJKD, traits))
        return outputs

    def in_chunks(
        self, kernels: Kernels, traits: LayerTraits, page_size: int, random: np.random.Generator
    ) -> list[Tensor]:
        """All of them, in steps of random chunks, over scattered pages."""
        each = -(-max(LENGTHS) // page_size)
        pages = random.permutation(each * len(LENGTHS)).astype(np.int32).reshape(len(LENGTHS), each)
        backend = CpuAttention(self.pool(page_size, pages.size), kernels, deterministic=True)
        outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
        done = [0] * len(LENGTHS)
        most = int(random.choice([1, 4, 60]))
        while items := list(steps(done, most, random)):
            rows = [
                AttentionItem(count, at + count, pages[index].copy(), False) for index, at, count in items
            ]
            step = backend.begin(rows, torch.zeros(1, sum(count for _, _, count in items), dtype=torch.int64))
            q_NHD = torch.cat([self.q[index][at : at + count] for index, at, count in items])
            kv_NJKD = torch.cat([self.kv[index][at : at + count] for index, at, count in items])
            got_NA = step(0, q_NHD, kv_NJKD, traits)
            for (index, _, count), rows_NA in zip(
                items, got_NA.split([count for _, _, count in items]), strict=True
            ):
                outputs[index].append(rows_NA)
                done[index] += count
        return [torch.cat(each) for each in outputs]


def steps(done: list[int], most: int, random: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """The index, first token and number of tokens of each sequence that goes on in this step."""
    for index, (at, length) in enumerate(zip(done, LENGTHS, strict=True)):
        if at < length:
            yield index, at, min(max(int(random.integers(1, most + 1)), length - LAST - at), length - at)


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
    sequences = Sequences(heads, kv_heads, dim, latent_dim)
    expected = sequences.alone(kernels, traits)
    assert all(each.isfinite().all() for each in expected)
    for number, page_size in enumerate((1, 4, 16, 256)):
        threads = (1, 3)[(number + sinks) % 2]
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        got = sequences.in_chunks(kernels, traits, page_size, random)
        assert all(map(torch.equal, got, expected)), f"pages of {page_size}, {threads} threads"
