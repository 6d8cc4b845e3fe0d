"""Whole steps whose rows have adapters give what each adapter's own model gives: the decoder of torch, with its updates
added to its weights. Rows without one are the same, bit for bit, whoever is beside them."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionBackend
from engine.cpu.library import Workers
from engine.cpu.matrix import PackedLinears
from engine.cpu.steps import WholeSteps
from engine.models.adapters import Adapter, read_adapters
from engine.models.config import parse_spec
from engine.models.decoder import Decoder
from engine.models.linear import PlainLinear
from engine.models.loader import LoadedModel, load_model
from engine.models.ops import TorchOps
from engine.models.protocol import AdaptedModel, AdapterRows
from engine.models.weights import DummyWeights
from engine.parallel.ranks import OneRank
from engine.settings import AdapterSettings, DTypeName, ModelSettings
from tests.unit.engine.attention.reference import ReferenceAttention
from tests.unit.engine.cpu.builds import RUNNING, every_build, kernels_of
from tests.unit.engine.cpu.test_steps import (
    BASE,
    CONFIGS,
    OF_LATENTS,
    STEPS,
    TOLERANCE,
    Sequences,
    poisoned_pool,
)
from tests.unit.engine.models.adapter_files import write_adapter

SEED = 5
OF_SEQUENCES = ("", "small", "large")


class MergedWeights(DummyWeights):
    """A model's weights with an adapter's updates."""

    adapter: Adapter

    def take(self, name: str) -> Tensor:
        weight = super().take(name)
        update = self.adapter.updates.get(name.removesuffix(".weight"))
        return weight if update is None else weight + update.b_OR.float() @ update.a_RI.float()


def load(
    directory: Path, config: dict[str, Any], linears: PackedLinears, dtype: DTypeName = "float32"
) -> LoadedModel:
    """With two adapters: one for every matrix, and one of a rank above 32 for some, in the first layer only."""
    (directory / "config.json").write_text(json.dumps(config))
    spec = parse_spec(config)
    in_first = ("layers.0.self_attn.k_proj", "layers.0.self_attn.o_proj", "layers.0.mlp.up_proj")
    adapters = (
        write_adapter(directory / "small", spec, 3),
        write_adapter(directory / "large", spec, 37, lambda name: name.endswith(in_first), seed=2),
    )
    settings = ModelSettings(str(directory), "dummy", dtype, "cpu", SEED, adapters=adapters)
    return load_model(settings, linears)


def merged(loaded: LoadedModel, directory: Path, config: dict[str, Any], name: str) -> LoadedModel:
    """The adapter's own model, layer by layer with torch's operators in float32."""
    spec = parse_spec(config)
    weights = MergedWeights(spec, torch.float32, SEED)
    weights.adapter = Adapter("", "", {})
    if name:
        (weights.adapter,) = read_adapters(
            [AdapterSettings(name, str(directory / name))], spec, torch.float32
        )
    model = Decoder(spec, weights, PlainLinear, torch.device("cpu"), torch.float32, TorchOps(), OneRank())
    return replace(loaded, model=model)


def run(loaded: LoadedModel, attention: AttentionBackend, adapters: tuple[str, ...] | None) -> list[Tensor]:
    """The hidden states of each of STEPS. The three sequences have these `adapters`."""
    sequences, outputs = Sequences(), []
    with torch.inference_mode():
        for counts in STEPS:
            tokens_N, positions_N, items, slots_PN = sequences.step(counts)
            attend = attention.begin(items, slots_PN)
            if adapters is None:
                outputs.append(loaded.model.forward(tokens_N, positions_N, attend))
                continue
            assert isinstance(loaded.model, AdaptedModel)
            rows = [AdapterRows(name, count) for name, count in zip(adapters, counts, strict=True) if count]
            outputs.append(loaded.model.forward_adapted(tokens_N, positions_N, attend, rows))
    return outputs


def rows_of(outputs: list[Tensor], sequence: int) -> Tensor:
    """One sequence's rows of all steps."""
    return torch.cat([output.split(counts)[sequence] for output, counts in zip(outputs, STEPS, strict=True)])


@functools.cache
def expected_of(name: str) -> dict[str, list[Tensor]]:
    """What each adapter's own model gives: for all builds and numbers of threads once."""
    with tempfile.TemporaryDirectory() as folder:
        directory, config = Path(folder), CONFIGS[name]
        whole = load(directory, config, PackedLinears(Workers(kernels_of(RUNNING[0]), 1), rounds=False))
        models = {adapter: merged(whole, directory, config, adapter) for adapter in OF_SEQUENCES[1:]}
    return {
        adapter: run(own, ReferenceAttention(poisoned_pool(own)), None) for adapter, own in models.items()
    }


@pytest.mark.parametrize(
    ("name", "threads"), [*((name, 1) for name in CONFIGS if name not in OF_LATENTS), ("biased", 3)]
)
@every_build
def test_each_sequence_has_its_adapter(tmp_path: Path, name: str, threads: int, variant: str) -> None:
    kernels = kernels_of(variant)
    whole = load(tmp_path, CONFIGS[name], PackedLinears(Workers(kernels, threads), rounds=False))
    assert isinstance(whole.model, WholeSteps)
    assert list(whole.adapters) == list(OF_SEQUENCES[1:])
    plain = run(whole, CpuAttention(poisoned_pool(whole), kernels), None)
    for adapters in (OF_SEQUENCES, OF_SEQUENCES[::-1], ("small", "small", "large")):
        mixed = run(whole, CpuAttention(poisoned_pool(whole), kernels), adapters)
        for sequence, adapter in enumerate(adapters):
            if not adapter:
                assert torch.equal(rows_of(mixed, sequence), rows_of(plain, sequence))
                continue
            alone = rows_of(expected_of(name)[adapter], sequence)
            torch.testing.assert_close(rows_of(mixed, sequence), alone, **TOLERANCE)
            assert not torch.allclose(alone, rows_of(plain, sequence), atol=0.1), "it changes nothing"


@every_build
def test_rows_of_adapters_are_rounded_like_others(tmp_path: Path, variant: str) -> None:
    """In sizes of AMX's tiles, which read beyond a span's last row."""
    kernels = kernels_of(variant)
    config = BASE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1}
    whole = load(tmp_path, config, PackedLinears(Workers(kernels, 3), rounds=True), dtype="bfloat16")
    mixed = run(whole, CpuAttention(poisoned_pool(whole), kernels), OF_SEQUENCES)
    for sequence, adapter in enumerate(OF_SEQUENCES):
        own = merged(whole, tmp_path, config, adapter)
        expected = rows_of(run(own, ReferenceAttention(poisoned_pool(own)), None), sequence)
        difference = rows_of(mixed, sequence) - expected
        assert difference.norm() < 0.02 * expected.norm(), adapter
