"""Engines over one random model: its shape, weights made once on the card, and a sink that keeps the times."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.api import DeltaSink, FinishReason, GenerateRequest, SamplingParams, TokenDelta
from engine.assembly import assemble_engine
from engine.build_runner import build_runner
from engine.engine import LocalEngine
from engine.kernels.choose import choose_ops
from engine.models.config import parse_spec, read_config
from engine.models.loader import LoadedModel, load_model
from engine.models.tensor_shapes import tensor_shapes
from engine.models.weights import DummyWeights
from engine.settings import (
    CacheSettings,
    DeviceName,
    DTypeName,
    ExecutionSettings,
    KVDType,
    LinearName,
    ModelSettings,
    SchedulerSettings,
    SpeculationSettings,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "1b": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    },
}  # fmt: skip
"""Shapes of published Llama models: 3.1 with 8 B and 3.2 with 1 B parameters (here without tied embeddings)."""

PAGE_SIZE = 16
STOP_S = 30.0


def config_of(shape: str, dtype: torch.dtype) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {
        **LLAMA,
        **SHAPES[shape],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": name,
        "torch_dtype": name,
    }


@dataclass
class Watch:
    """A DeltaSink that notes when tokens of each request came. Times are those of time.perf_counter."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    """One time for each token; tokens of the same delta have the same."""
    cached: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    finished: set[str] = field(default_factory=set)

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        now_s = time.perf_counter()
        with self.changed:
            for delta in deltas:
                self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                self.times_s.setdefault(delta.request_id, []).extend([now_s] * len(delta.token_ids))
                self.cached[delta.request_id] = delta.cached_tokens
                if delta.finish is not None:
                    self.finished.add(delta.request_id)
                    if delta.finish.reason is FinishReason.ERROR:
                        self.errors.append(f"{delta.request_id}: {delta.finish}")
            self.changed.notify_all()

    def wait(self, names: Sequence[str], limit_s: float) -> None:
        """Waits until all have finished. Raises RuntimeError if one ended with an error, TimeoutError after
        `limit_s`."""
        with self.changed:
            done = self.changed.wait_for(lambda: bool(self.errors) or self.finished >= set(names), limit_s)
        if self.errors:
            raise RuntimeError(self.errors[0])
        if not done:
            raise TimeoutError(f"{len(set(names) - self.finished)} requests not done after {limit_s:.0f} s")


class Bench:
    """Builds engines over one random model, whose weights they share."""

    def __init__(
        self, shape: str, device: torch.device, folder: Path, seed: int = 1, fp8: bool = False
    ) -> None:
        self.device, self.seed, self.shape = device, seed, shape
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config = config_of(shape, self.dtype)
        self.fp8 = fp8
        if fp8:
            block = [128, 128] if shape != "tiny" else [16, 16]
            self.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
        (folder / "config.json").write_text(json.dumps(self.config))
        self.folder = folder
        self.spec = parse_spec(read_config(folder))
        self._loaded: LoadedModel | None = None
        self._loaded_for: tuple[LinearName, bool] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all but the table of embeddings, of which it reads a row a token."""
        shapes = tensor_shapes(self.spec)
        sizes = (torch.Size(shape).numel() for shape in shapes.values())
        projections = [shape for name, shape in shapes.items() if name.endswith("_proj.weight")]
        kept = sum(torch.Size(shape).numel() for shape in projections) if self.fp8 else 0
        scales = 0
        if self.fp8 and self.spec.fp8 is not None and self.spec.fp8.block is not None:
            columns = self.spec.fp8.block[1]
            scales = sum(4 * outputs * -(-inputs // columns) for outputs, inputs in projections)
        return (
            scales
            - kept * (self.dtype.itemsize - 1)
            + (sum(sizes) - self.spec.vocab_size * self.spec.hidden_size) * self.dtype.itemsize
        )

    @property
    def kv_token_bytes(self) -> int:
        layout = self.spec.kv_layout
        return layout.page_bytes(layout.num_layers, 1, self.dtype)

    def weights(self) -> DummyWeights:
        """The weights that all engines of this bench share."""
        return DummyWeights(self.spec, self.dtype, self.seed, self.device)

    @contextlib.contextmanager
    def engine(
        self,
        watch: DeltaSink,
        kv_tokens: int,
        execution: ExecutionSettings,
        scheduler: SchedulerSettings,
        kv_dtype: KVDType = "auto",
    ) -> Iterator[LocalEngine]:
        """A started engine with a KV pool of `kv_tokens`; at the end its memory is freed."""
        dtype: DTypeName = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        device: DeviceName = "cuda" if self.device.type == "cuda" else "cpu"
        model = ModelSettings(
            str(self.folder),
            load_format="dummy",
            dtype=dtype,
            device=device,
            seed=self.seed,
            keep_fp8=self.fp8 and device == "cuda",
        )
        cache = CacheSettings(page_size=PAGE_SIZE, num_pages=-(-kv_tokens // PAGE_SIZE), kv_dtype=kv_dtype)
        self._clear()
        loaded = self._load(model, execution)
        runner = build_runner(loaded, cache, scheduler=scheduler, execution=execution)
        speculation = SpeculationSettings()
        engine = assemble_engine(
            runner, cache, scheduler, speculation, loaded.eos_token_ids, watch, execution
        )
        engine.start()
        try:
            yield engine
        finally:
            engine.stop(STOP_S)
            del engine, runner
            self._clear()

    def close(self) -> None:
        self._loaded = None
        self._clear()

    def _load(self, settings: ModelSettings, execution: ExecutionSettings) -> LoadedModel:
        """Loads once as long as products stay the same; engine/build.py would load for each engine."""
        wanted = execution.linear, execution.deterministic
        if self._loaded is None or wanted != self._loaded_for:
            self.close()
            linear, deterministic = wanted
            self._loaded = load_model(
                settings, ops=choose_ops(self.device), linear=linear, deterministic=deterministic
            )
            self._loaded_for = wanted
        return self._loaded

    def _clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def request(name: str, prompt: Sequence[int], new_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, list(prompt), greedy(new_tokens))
