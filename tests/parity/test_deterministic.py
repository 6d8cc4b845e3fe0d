"""With `execution.deterministic` a sequence's log-probabilities are the same to the last bit, whatever ran beside it.

The cells of test_matrix.py: sessions and other requests under chunks, drafts, retraction, aborts, rewinds and demotion.
Each result is compared with one pass over the whole sequence in a fresh engine, which has other threads and pages. On a
GPU models are computed in the dtype of their weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api import GenerateRequest, LogprobParams, SamplingParams, TokenDelta, TokenLogprob
from engine.assembly import assemble_engine
from engine.attention import tiles
from engine.build_runner import build_runner
from engine.kernels.choose import choose_ops
from engine.models.loader import LoadedModel, load_model
from engine.settings import (
    CacheSettings,
    DeviceName,
    DTypeName,
    ExecutionSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from tests.parity.matrix_cell import CONTEXT, Cell, CellRun
from tests.parity.place import DEVICE
from tests.parity.schedules import Finished

pytestmark = pytest.mark.slow
DEVICE_NAME: DeviceName = "cuda" if DEVICE.type == "cuda" else "cpu"

VOCAB = 24
SIZES = {
    "vocab_size": VOCAB,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
}
SMALL_HEADS = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 72}

MODELS: dict[str, tuple[Any, DTypeName]] = {
    "small": (transformers.MistralConfig(**SIZES, **SMALL_HEADS, sliding_window=None), "bfloat16"),
    "windowed": (transformers.MistralConfig(**SIZES, **SMALL_HEADS, sliding_window=29), "float32"),
    "wide": (transformers.Qwen3Config(**SIZES, **WIDE_HEADS), "float16"),
}
"""Configurations, and the dtype of their weights: the kernels have a way for each."""

if DEVICE.type == "cpu":
    MODELS["experts"] = (
        transformers.Qwen3MoeConfig(
            **SIZES, **SMALL_HEADS, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40
        ),
        "bfloat16",
    )
    MODELS["sinks"] = (
        transformers.GptOssConfig(
            **SIZES,
            **SMALL_HEADS,
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=29,
            rope_parameters=YARN,
        ),
        "float32",
    )
    MODELS["latents"] = (
        transformers.DeepseekV3Config(
            **SIZES,
            **SMALL_HEADS | {"num_attention_heads": 20, "num_key_value_heads": 20},
            kv_lora_rank=24,
            q_lora_rank=28,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            first_k_dense_replace=1,
            n_group=4,
            topk_group=2,
        ),
        "bfloat16",
    )

SPECULATION: tuple[SpeculationMethod, ...] = ("off", "ngram", "draft")
PAGE_SIZES = (1, 16, 256)


def name_of(cell: Cell) -> str:
    return (
        f"{cell.speculation}-page{cell.page_size}{'-chunked' * cell.chunked}{'-retracting' * cell.retracting}"
    )


def cells_of(models: Iterable[str], first_seed: int, **options: Any) -> list[Any]:
    """Models and their cells. Of model, proposer, page size and disturbance every three are there in every combination,
    except for model, proposer and page size: each model has each proposer with two page sizes of the three."""
    cells = []
    for (at, model), (kind, speculation), disturbed in product(
        enumerate(models), enumerate(SPECULATION), (False, True)
    ):
        page = (at + kind + disturbed) % 3
        seed = first_seed + 6 * kind + 2 * page + disturbed
        cell = Cell(speculation, PAGE_SIZES[page], disturbed, disturbed, seed, **options)
        cells.append(pytest.param(model, cell, id=f"{model}-{name_of(cell)}"))
    return cells


@dataclass
class Models:
    """One model on one thread and on two, and one to draft. Steps are mixed on one of the two, and single passes run on
    the other. Most runs of small steps take one thread: on a busy machine two wait for each other."""

    one_thread: LoadedModel
    two_threads: LoadedModel
    draft: LoadedModel

    def mixed(self, cell: Cell) -> LoadedModel:
        return self.two_threads if cell.page_size == 16 else self.one_thread

    def alone(self, cell: Cell) -> LoadedModel:
        return self.one_thread if cell.page_size == 16 else self.two_threads


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory, small = (saved(name, tmp_path_factory.mktemp(name)) for name in (request.param, "small"))
    dtype = MODELS[request.param][1]
    two_threads = load(directory, dtype, 2)
    # The models loaded last leave torch itself one thread: two would wait for each other in each small operator.
    draft = load(small, "float32", 1, deterministic=False)
    return Models(load(directory, dtype, 1), two_threads, draft)


def saved(name: str, directory: Path) -> Path:
    torch.manual_seed(5)
    model: Any = transformers.AutoModelForCausalLM.from_config(MODELS[name][0], dtype=torch.float32)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in each else 0.0, 0.25)
    model.save_pretrained(directory)
    return directory


def load(directory: Path, dtype: DTypeName, threads: int, *, deterministic: bool = True) -> LoadedModel:
    settings = ModelSettings(str(directory), dtype=dtype, device=DEVICE_NAME, num_threads=threads)
    return load_model(settings, ops=choose_ops(DEVICE), deterministic=deterministic)


@pytest.mark.parametrize(("models", "cell"), cells_of(MODELS, 500, top=VOCAB), indirect=["models"])
def test_what_ran_beside_a_request_changes_no_bit_of_it(
    models: Models, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU sequences are long enough for two splits."""
    monkeypatch.setattr(tiles, "EVERY_SPLIT", 64)
    run = CellRun(cell, models.mixed(cell), models.draft if cell.speculation == "draft" else None)
    run.run()
    assert len(run.finished) >= 30
    passes = SinglePasses(models.alone(cell), cell.page_size)
    for each in run.finished:
        assert each.logprobs == passes.logprobs(each), (each.what, cell.seed)
    passes.close()


class SinglePasses:
    """An engine that computes each sequence alone, anew and in one chunk."""

    def __init__(self, loaded: LoadedModel, page_size: int) -> None:
        cache = CacheSettings(page_size, 2 * CONTEXT // page_size + 2, window_ratio=1.0, prefix_cache=False)
        limits = SchedulerSettings(max_batch_tokens=CONTEXT, chunk_size=CONTEXT)
        execution = ExecutionSettings(graphs=False)
        self._deltas: list[TokenDelta] = []
        self._runner = build_runner(loaded, cache, scheduler=limits, execution=execution)
        self._engine = assemble_engine(
            self._runner, cache, limits, SpeculationSettings(), frozenset(), self._deltas.extend
        )

    def logprobs(self, finished: Finished) -> list[TokenLogprob]:
        """The output's, by a pass over all its tokens but the last, which it gives anew."""
        self._deltas.clear()
        asked = LogprobParams(output=True, top=VOCAB, input_start=finished.prompt_len - 1)
        self._engine.submit(
            GenerateRequest(
                "again",
                finished.tokens[:-1],
                SamplingParams(1, temperature=0.0),
                logprobs=asked,
                adapter=finished.adapter,
            )
        )
        self._engine._drain_inbox(block=False)
        while self._engine.step():
            pass
        assert self._deltas[-1].cached_tokens == 0
        _, *inputs = [entry for delta in self._deltas for entry in delta.input_logprobs]
        return [*inputs, *(entry for delta in self._deltas for entry in delta.logprobs)]

    def close(self) -> None:
        self._runner.close()
