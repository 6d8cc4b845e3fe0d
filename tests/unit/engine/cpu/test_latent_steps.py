"""Whole steps of models with latent attention, where prompts have keys and values of their own, against torch's
operators over the reference attention. Unused pool entries are NaN."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionBackend, AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.cpu.library import Workers
from engine.cpu.matrix import PackedLinears
from engine.cpu.steps import WholeSteps
from engine.models.linear import PlainLinear
from engine.models.loader import LoadedModel
from tests.unit.engine.cpu.builds import every_build, every_build_and, kernels_of
from tests.unit.engine.cpu.test_steps import LATENTS, PAGE_SIZE, PAGES, TOLERANCE, load, poisoned_pool

TABLES = np.random.default_rng(3).permutation(PAGES).astype(np.int32).reshape(2, -1)
"""The pages of two sequences, 768 tokens each."""

DENSE = LATENTS | {"num_hidden_layers": 2, "first_k_dense_replace": 2}


def steps_of(lengths: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, list[AttentionItem], Tensor]]:
    """Steps with so many new tokens of each sequence."""
    random, done = torch.Generator().manual_seed(4), [0, 0]
    for counts in lengths:
        positions, slots, items = [], [], []
        for index, count in enumerate(counts):
            new = range(done[index], done[index] + count)
            positions += new
            slots += [int(TABLES[index][t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE for t in new]
            done[index] += count
            if count:
                items.append(AttentionItem(count, done[index], TABLES[index], False))
        tokens_N = torch.randint(0, 131, (len(positions),), generator=random)
        yield tokens_N, torch.tensor(positions), items, torch.tensor([slots])


def run(loaded: LoadedModel, attention: AttentionBackend, lengths: list[tuple[int, int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [
            loaded.model.forward(tokens_N, positions_N, attention.begin(items, slots_PN))
            for tokens_N, positions_N, items, slots_PN in steps_of(lengths)
        ]


@functools.cache
def expected_of(config: str, lengths: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """What the decoder of torch gives: for all builds and numbers of threads once. `config` is JSON."""
    with tempfile.TemporaryDirectory() as directory:
        plain = load(Path(directory), json.loads(config), PlainLinear)
    return run(plain, TorchAttention(poisoned_pool(plain)), list(lengths))


def compare(
    directory: Path, variant: str, threads: int, config: dict[str, Any], lengths: list[tuple[int, int]]
) -> None:
    kernels = kernels_of(variant)
    expected = expected_of(json.dumps(config), tuple(lengths))
    whole = load(directory, config, PackedLinears(Workers(kernels, threads), rounds=False))
    assert isinstance(whole.model, WholeSteps)
    got = run(whole, CpuAttention(poisoned_pool(whole), kernels), lengths)
    for step, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert one.isfinite().all()
        torch.testing.assert_close(other, one, **TOLERANCE, msg=f"step {step}")


@pytest.mark.parametrize("query_rank", [30, None], ids=["query latents", "plain queries"])
@every_build_and(1, 3, 7)
def test_prompts_of_many_queries(tmp_path: Path, variant: str, query_rank: int | None, threads: int) -> None:
    """Alone, beside a decode and beside another prompt; behind a history; longer than what is taken at a time. With 7
    threads and 5 heads only the longest has enough shares."""
    lengths = [(70, 1), (256, 1), (0, 560), (430, 1), (1, 1), (11, 204)]
    compare(tmp_path, variant, threads, DENSE | {"q_lora_rank": query_rank}, lengths)
    compare(tmp_path, variant, threads, DENSE | {"q_lora_rank": query_rank}, [(767, 300), (1, 460)])


@pytest.mark.parametrize(("rank", "rotary_dim"), [(40, 8), (33, 2), (72, 8), (36, 2), (8, 8)])
@every_build
def test_padding_of_a_query_s_latent_part_stays_in_its_row(
    tmp_path: Path, variant: str, rank: int, rotary_dim: int
) -> None:
    """A product writes whole pairs of vectors, which may be more than a latent and its rotary features have."""
    config = DENSE | {"kv_lora_rank": rank, "qk_rope_head_dim": rotary_dim}
    compare(tmp_path, variant, 3, config, [(60, 3), (1, 1), (40, 9)])


@pytest.mark.parametrize("heads", [1, 3])
def test_rotary_features_at_an_odd_place_without_compiled_steps(tmp_path: Path, heads: int) -> None:
    """One row of a product is dense wherever it is cut, and complex numbers begin at even places."""
    config = DENSE | {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 27}
    plain = load(tmp_path, config, PlainLinear)
    together, apart = (
        run(plain, TorchAttention(poisoned_pool(plain)), lengths) for lengths in ([(9, 0)], [(8, 0), (1, 0)])
    )
    torch.testing.assert_close(apart[1], together[0][8:], **TOLERANCE)


@every_build
def test_equal_bits_however_a_long_prompt_is_cut(tmp_path: Path, variant: str) -> None:
    """With `deterministic` no prompt has keys and values of its own."""
    kernels = kernels_of(variant)
    whole = load(tmp_path, DENSE, PackedLinears(Workers(kernels, 2), rounds=False))
    together, apart = (
        run(whole, CpuAttention(poisoned_pool(whole), kernels, deterministic=True), lengths)
        for lengths in ([(700, 0)], [(256, 0), (200, 0), (244, 0)])
    )
    assert torch.equal(torch.cat(apart), together[0])
