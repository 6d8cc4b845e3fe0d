"""Whole steps in the kernels give what the decoder gives layer by layer with torch's own operators."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionBackend, AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.cpu.library import NO_MEMORY, Workers, check
from engine.cpu.matrix import PackedLinears
from engine.cpu.steps import WholeSteps
from engine.models.linear import PlainLinear
from engine.models.loader import LoadedModel, load_model
from engine.runner.kv_pool import KVPool, make_kv_pool
from engine.settings import CacheSettings, DTypeName, ModelSettings
from tests.unit.engine.attention.reference import ReferenceAttention
from tests.unit.engine.cpu.builds import RUNNING, every_build, every_build_and, kernels_of

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "float32",
}
EXPERTS = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


GPT_OSS = BASE | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 21,
    "rope_theta": 150_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}


LATENTS = BASE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 21,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 44,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def packed(bits: int, group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group}


CONFIGS = {
    "llama": BASE,
    "biased": BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "experts": EXPERTS,
    "int4": BASE | {"quantization_config": packed(4, 10)},
    "gpt_oss": GPT_OSS,
    "fp4 experts": GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
    "latents": LATENTS,
    "latents of many heads": LATENTS
    | {"q_lora_rank": None, "num_attention_heads": 20, "num_key_value_heads": 20, "n_shared_experts": 0},
    "groups by their best": LATENTS
    | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"}
    | {"norm_topk_prob": False, "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7}},
    "int8 experts": EXPERTS | {"quantization_config": packed(8, -1)},
    "fp8": BASE
    | {"head_dim": 32, "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 24]}},
    "window": BASE
    | {"architectures": ["MistralForCausalLM"], "sliding_window": 21, "num_key_value_heads": 6},
}
OF_LATENTS = ("latents", "latents of many heads", "groups by their best")
PAGES, PAGE_SIZE = 96, 16
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def load(directory: Path, config: dict[str, Any], linears: Any, dtype: DTypeName = "float32") -> LoadedModel:
    (directory / "config.json").write_text(json.dumps(config))
    settings = ModelSettings(str(directory), load_format="dummy", dtype=dtype, device="cpu", seed=5)
    return load_model(settings, linears)


def poisoned_pool(loaded: LoadedModel) -> KVPool:
    settings = CacheSettings(PAGE_SIZE, PAGES, window_ratio=1.0)
    pool = make_kv_pool(loaded.layout, settings, torch.float32, torch.device("cpu"))
    for paged in (pool.full, pool.window):
        if paged is not None:
            paged.kv_LJKSD.fill_(torch.nan)
    return pool


class Sequences:
    """Three sequences. The pages of the first and third are scattered, those of the second are one run."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        scattered = random.permutation(np.arange(2 * PAGES // 3, dtype=np.int32))
        self.pages = [scattered[:32], np.arange(64, 96, dtype=np.int32), scattered[32:]]
        self.lengths = [0, 0, 0]
        self.tokens = torch.Generator().manual_seed(2)

    def step(self, counts: list[int]) -> tuple[Tensor, Tensor, list[AttentionItem], Tensor]:
        """A step with this many tokens of each sequence. A sequence with no tokens is left out."""
        positions, slots, items = [], [], []
        for index, count in enumerate(counts):
            if count == 0:
                continue
            start, pages = self.lengths[index], self.pages[index]
            self.lengths[index] += count
            positions += range(start, start + count)
            slots += [
                int(pages[p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in range(start, start + count)
            ]
            items.append(AttentionItem(count, start + count, pages, False, pages))
        tokens = torch.randint(0, 131, (len(positions),), generator=self.tokens)
        return tokens, torch.tensor(positions), items, torch.tensor([slots, slots])


STEPS = [[5, 1, 0], [1, 1, 40], [300, 1, 7], [1, 2, 1], [1, 1, 1], [9, 0, 1], [3, 17, 64], [1, 1, 1]]


def run(loaded: LoadedModel, attention: AttentionBackend) -> list[Tensor]:
    """Runs STEPS. Returns each step's hidden states and logits."""
    sequences, outputs = Sequences(), []
    with torch.inference_mode():
        for counts in STEPS:
            tokens_N, positions_N, items, slots_PN = sequences.step(counts)
            hidden_NE = loaded.model.forward(tokens_N, positions_N, attention.begin(items, slots_PN))
            outputs += [hidden_NE, loaded.model.logits(hidden_NE[::2])]
    return outputs


@functools.cache
def expected_of(name: str) -> list[Tensor]:
    """What the decoder of torch gives: for all builds and numbers of threads once, because it takes the longest."""
    with tempfile.TemporaryDirectory() as directory:
        plain = load(Path(directory), CONFIGS[name], PlainLinear)
    return run(plain, ReferenceAttention(poisoned_pool(plain)))


@pytest.mark.parametrize("name", CONFIGS)
@every_build_and(1, 3)
def test_equals_the_decoder_of_torch(tmp_path: Path, name: str, threads: int, variant: str) -> None:
    kernels = kernels_of(variant)
    whole = load(tmp_path, CONFIGS[name], PackedLinears(Workers(kernels, threads), rounds=False))
    assert isinstance(whole.model, WholeSteps)
    assert whole.about["linear"] == "cpu"
    pool = poisoned_pool(whole)
    for got in (run(whole, CpuAttention(pool, kernels)), run(whole, TorchAttention(pool))):
        for one, other in zip(expected_of(name), got, strict=True):
            torch.testing.assert_close(other, one, **TOLERANCE)


@every_build
def test_experts_of_many_and_of_few_rows_are_rounded_as_each_would_be_alone(
    tmp_path: Path, variant: str
) -> None:
    """Some experts of a step have more rows than are worth rounding, others have none. Sizes are those of AMX's tiles,
    which read beyond an expert's last row."""
    kernels = kernels_of(variant)
    config = BASE | CONFIGS["experts"] | {"hidden_size": 64, "num_hidden_layers": 1, "mlp_only_layers": []}
    config |= {"num_experts": 40, "moe_intermediate_size": 96}
    linears = PackedLinears(Workers(kernels, 3), rounds=True)
    whole = load(tmp_path, config, linears, dtype="bfloat16")
    assert isinstance(whole.model, WholeSteps)
    pool = poisoned_pool(whole)
    grouped, apart = run(whole, CpuAttention(pool, kernels)), run(whole, TorchAttention(pool))
    for one, other in zip(grouped, apart, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)


def test_more_rows_of_experts_than_are_in_memory_at_a_time(tmp_path: Path) -> None:
    kernels = kernels_of(RUNNING[0] if RUNNING else "none")
    config = CONFIGS["experts"] | {"num_experts": 12, "num_experts_per_tok": 10}
    plain = load(tmp_path, config, PlainLinear)
    whole = load(tmp_path, config, PackedLinears(Workers(kernels, 2), rounds=False))
    tokens_N, positions_N = torch.arange(1000) % 131, torch.arange(1000)
    pages = np.arange(63, dtype=np.int32)
    items = [AttentionItem(1000, 1000, pages, False, pages)]
    slots_PN = torch.stack([positions_N, positions_N])
    with torch.inference_mode():
        expected, got = (
            loaded.model.forward(tokens_N, positions_N, attention.begin(items, slots_PN))
            for loaded, attention in (
                (plain, ReferenceAttention(poisoned_pool(plain))),
                (whole, CpuAttention(poisoned_pool(whole), kernels)),
            )
        )
    torch.testing.assert_close(got, expected, **TOLERANCE)


@every_build
def test_a_step_s_rows_do_not_depend_on_batch_mates(tmp_path: Path, variant: str) -> None:
    """This holds for numbers of rows that are computed in the same way."""
    kernels = kernels_of(variant)
    whole = load(tmp_path, BASE, PackedLinears(Workers(kernels, 1), rounds=False))
    results = []
    for mates in ([1, 0, 0], [1, 1, 1]):
        attention, sequences = CpuAttention(poisoned_pool(whole), kernels), Sequences()
        with torch.inference_mode():
            for counts in ([40, 40, 40], mates):
                tokens_N, positions_N, items, slots_PN = sequences.step(counts)
                tokens_N[0] = 7
                hidden_NE = whole.model.forward(tokens_N, positions_N, attention.begin(items, slots_PN))
        results.append(hidden_NE[0])
    assert torch.equal(*results)


@every_build
def test_no_memory_is_an_error(tmp_path: Path, variant: str) -> None:
    kernels = kernels_of(variant)
    workers = Workers(kernels, 1)
    whole = load(tmp_path, BASE, PackedLinears(workers, rounds=False)).model
    rows = 2**31 - 1  # no machine has room for that many
    outcome = kernels.c.kedge_decoder_head(whole._handle, workers.team, rows, None, None)
    assert outcome == NO_MEMORY
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        check(outcome, "a step")


BROKEN: dict[str, Callable[[AttentionItem], AttentionItem]] = {
    "too short": lambda item: replace(item, pages=item.pages[:2]),
    "past the pool": lambda item: replace(item, pages=item.pages + PAGES),
    "gone": lambda item: replace(item, pages=np.full_like(item.pages, -1)),
    "no new tokens": lambda item: replace(item, query_len=0),
    "shorter than what is new": lambda item: replace(item, kv_len=3),
    "other rows": lambda item: replace(item, query_len=item.query_len - 1),
}


@pytest.mark.parametrize("fault", BROKEN)
@every_build
def test_tables_that_lead_out_of_the_pool_are_refused(tmp_path: Path, fault: str, variant: str) -> None:
    """They are refused before anything is read or written through them."""
    kernels = kernels_of(variant)
    whole = load(tmp_path, BASE, PackedLinears(Workers(kernels, 2), rounds=False))
    pool = poisoned_pool(whole)
    tokens_N, positions_N, items, slots_PN = Sequences().step([40, 40, 40])
    step = CpuAttention(pool, kernels).begin([items[0], BROKEN[fault](items[1]), items[2]], slots_PN)
    step.items_c.rows = len(tokens_N)
    with torch.inference_mode(), pytest.raises(IndexError, match="page table"):
        whole.model.forward(tokens_N, positions_N, step)
    assert pool.full.kv_LJKSD.isnan().all()


@every_build
def test_positions_past_the_context_are_refused(tmp_path: Path, variant: str) -> None:
    kernels = kernels_of(variant)
    whole = load(tmp_path, BASE, PackedLinears(Workers(kernels, 1), rounds=False))
    tokens_N, positions_N, items, slots_PN = Sequences().step([40, 0, 0])
    for position in (-1, BASE["max_position_embeddings"]):
        positions_N[7] = position
        step = CpuAttention(poisoned_pool(whole), kernels).begin(items, slots_PN)
        with torch.inference_mode(), pytest.raises(IndexError, match="position"):
            whole.model.forward(tokens_N, positions_N, step)
