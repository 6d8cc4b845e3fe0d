"""The compiled attention against the reference, in every build that runs here. Unused pool entries are NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionBackend, AttentionItem, AttentionUnavailable, LayerTraits
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.item_scene import LONGEST, Scene, seeds_of
from tests.unit.engine.attention.reference import ReferenceAttention
from tests.unit.engine.cpu.builds import every_build, every_build_and, kernels_of

CPU = torch.device("cpu")


@functools.cache
def reference(
    seed: int, page_size: int, contiguous: bool, most_queries: int, kind: str, latent: bool = False
) -> list[torch.Tensor]:
    """What the reference gives for a scene: for all builds once, because it takes longer than they do."""
    scene = Scene(seed, page_size, contiguous, most_queries, latent=latent)
    return list(scene.run(ReferenceAttention, kind))


@pytest.mark.parametrize("kind", ["plain", "sinks", "cap and sinks"])
@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@every_build
def test_equals_the_reference(
    variant: str, page_size: int, contiguous: bool, most_queries: int, kind: str
) -> None:
    kernels = kernels_of(variant)
    for seed in seeds_of(page_size, most_queries, kind):
        expected = reference(seed, page_size, contiguous, most_queries, kind)
        got = Scene(seed, page_size, contiguous, most_queries).run(
            lambda pool: CpuAttention(pool, kernels), kind
        )
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed} layer {layer}")


@pytest.mark.parametrize("kind", ["plain", "sinks", "cap"])
@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("page_size", [1, 16])
@every_build
def test_latents_equal_the_reference(variant: str, page_size: int, most_queries: int, kind: str) -> None:
    kernels = kernels_of(variant)
    for seed in seeds_of(page_size, most_queries, kind):
        expected = reference(seed, page_size, False, most_queries, kind, latent=True)
        got = Scene(seed, page_size, False, most_queries, latent=True).run(
            lambda pool: CpuAttention(pool, kernels), kind
        )
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed} layer {layer}")


PAGES = [np.arange(p, p + 80, dtype=np.int32)[::step].copy() for p, step in ((0, 1), (80, -1), (160, 1))]
HISTORY, NEW = [1100, 3, 700], [1, 1, 3]


def poisoned(layout: KVLayout) -> KVPool:
    pool = make_kv_pool(layout, CacheSettings(16, 240), torch.float32, CPU)
    pool.full.kv_LJKSD.fill_(torch.nan)
    return pool


def planned(counts: list[int], lengths: list[int]) -> tuple[list[AttentionItem], torch.Tensor]:
    """The items and their slots, in pages of 16 tokens."""
    rows = list(zip(counts, lengths, PAGES, strict=True))
    slots = [
        int(table[t // 16]) * 16 + t % 16
        for count, length, table in rows
        for t in range(length - count, length)
    ]
    return [AttentionItem(count, length, table, False) for count, length, table in rows], torch.tensor(
        [slots]
    )


def decoded(
    make: Callable[[KVPool], AttentionBackend], layout: KVLayout, heads: int, window: int | None, sinks: bool
) -> torch.Tensor:
    """The output for a few new tokens after long histories. The reference writes the histories for every backend: they
    would compute what nobody reads."""
    pool = poisoned(layout)
    random = torch.Generator().manual_seed(heads)
    traits = LayerTraits(0.25, window, sinks_H=6 * torch.randn(heads, generator=random) if sinks else None)
    vectors = layout.num_vectors
    kv_NJKD = torch.randn(sum(HISTORY), vectors, layout.num_kv_heads, layout.head_dim, generator=random)
    ReferenceAttention(pool).begin(*planned(HISTORY, HISTORY)).write(0, kv_NJKD)
    q_NHD = 2 * torch.randn(sum(NEW), heads, layout.head_dim, generator=random)
    kv_NJKD = torch.randn(sum(NEW), vectors, layout.num_kv_heads, layout.head_dim, generator=random)
    lengths = [history + new for history, new in zip(HISTORY, NEW, strict=True)]
    return make(pool).begin(*planned(NEW, lengths))(0, q_NHD, kv_NJKD, traits)


@functools.cache
def decoded_by_the_reference(layout: KVLayout, heads: int, window: int | None, sinks: bool) -> torch.Tensor:
    """For all builds and numbers of threads once."""
    return decoded(ReferenceAttention, layout, heads, window, sinks)


@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@every_build
def test_a_sink_of_nothing_is_none(variant: str, most_queries: int) -> None:
    kernels = kernels_of(variant)

    class Sunk(Scene):
        def traits(self, kind: str) -> list[LayerTraits]:
            sinks_H = torch.full((self.heads,), -torch.inf) if kind == "nothing" else None
            return [replace(each, sinks_H=sinks_H) for each in super().traits("plain")]

    for seed in range(6):
        outputs = (
            Sunk(seed, 16, False, most_queries).run(lambda pool: CpuAttention(pool, kernels), kind)
            for kind in ("plain", "nothing")
        )
        for one, other in zip(*outputs, strict=True):
            torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-6, msg=f"seed {seed}")


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@every_build_and(1, 3)
def test_long_histories_of_many_heads(
    variant: str, sinks: bool, threads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histories are so long that several threads share the keys of some rows."""
    kernels = kernels_of(variant)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shapes = ((5, 5, None), (8, 1, None), (14, 2, None), (6, 2, 400), (4, 2, 7), (19, 1, None), (24, 2, 500))
    for heads, kv_heads, window in shapes:
        layout = KVLayout(kv_heads, dim, (None,))
        expected = decoded_by_the_reference(layout, heads, window, sinks)
        got = decoded(lambda pool: CpuAttention(pool, kernels), layout, heads, window, sinks)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dim", "latent_dim"), [(40, 24), (40, 33), (576, 512)])
@every_build_and(1, 3, 7)
def test_long_histories_of_latents(
    variant: str, dim: int, latent_dim: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = kernels_of(variant)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layout = KVLayout(1, dim, (None,), latent_dim)
    for heads, window, sinks in ((3, None, False), (16, None, False), (16, 700, True), (40, None, True)):
        expected = decoded_by_the_reference(layout, heads, window, sinks)
        got = decoded(lambda pool: CpuAttention(pool, kernels), layout, heads, window, sinks)
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)


@every_build
def test_pools_that_the_kernels_do_not_read_are_refused(variant: str) -> None:
    kernels = kernels_of(variant)
    layout, settings = KVLayout(2, 8, (None,)), CacheSettings(16, 2)
    with pytest.raises(AttentionUnavailable, match="bfloat16"):
        CpuAttention(make_kv_pool(layout, settings, torch.bfloat16, CPU), kernels)
    with pytest.raises(AttentionUnavailable, match="1024"):
        CpuAttention(make_kv_pool(KVLayout(1, 1024, (None,)), settings, torch.float32, CPU), kernels)
