"""The fused small operators against torch's own, one by one and in whole decoders with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.kernels import choose, trial
from engine.kernels.choose import choose_ops, triton_trouble
from engine.kernels.decoder_ops import TritonOps
from engine.models.decoder import Decoder
from engine.models.layers import RotaryTable
from engine.models.loader import load_model
from engine.models.ops import DecoderOps, TorchOps
from engine.models.rope import RopeSpec
from engine.settings import ModelSettings
from tests.parity.streams import CONTEXT, VOCAB, prompts, serve

EPS = 1e-5
FEW_TOKENS = 6
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
CONFIGS = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
}


def produced(directory: Path, ops: DecoderOps) -> list[list[int]]:
    """The greedy tokens of four prompts, in chunks and mixed with decodes."""
    settings = ModelSettings(str(directory), load_format="dummy", dtype="float32", seed=9)
    loaded = load_model(settings, ops=ops, linear="torch")  # compiled kernels have operators of their own
    assert isinstance(loaded.model, Decoder)
    return [stream.produced for stream in serve(loaded, prompts(), 16, True, 40, FEW_TOKENS)]


@pytest.mark.parametrize("name", CONFIGS)
def test_decoders_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    expected = produced(tmp_path, TorchOps())
    assert len({token for tokens in expected for token in tokens}) > 4, (
        "a model that says one thing proves little"
    )
    assert produced(tmp_path, TritonOps()) == expected


@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 24)])
def test_norms(device: torch.device, shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    x, delta = torch.randn(2, *shape, device=device)
    weight = torch.randn(shape[1:], device=device)
    expected, got = TorchOps().norm(weight, EPS), TritonOps().norm(weight, EPS)
    torch.testing.assert_close(got(x), expected(x), atol=1e-6, rtol=1e-5)
    other = x.clone()
    torch.testing.assert_close(got.add_(x, delta), expected.add_(other, delta), atol=1e-6, rtol=1e-5)
    assert torch.equal(x, other)


@pytest.mark.parametrize("normed", [False, True])
def test_rotations(device: torch.device, normed: bool) -> None:
    torch.manual_seed(5)
    x_NHD = torch.randn(4, 5, 32, device=device)
    weight_HD = torch.randn(5, 32, device=device) if normed else None
    table = RotaryTable(RopeSpec(), 32, 64, device)
    rotations_N1C = table.rotations(torch.tensor([0, 3, 40, 63], device=device))
    other_NHD = x_NHD.clone()
    TorchOps().rotation(weight_HD, EPS)(x_NHD, rotations_N1C)
    TritonOps().rotation(weight_HD, EPS)(other_NHD, rotations_N1C)
    torch.testing.assert_close(other_NHD, x_NHD, atol=2e-6, rtol=1e-5)


def test_silu_mul(device: torch.device) -> None:
    gate_up_N2F = torch.randn(3, 90, generator=torch.Generator().manual_seed(6)).to(device)
    got_NF, expected_NF = (ops.silu_mul(gate_up_N2F) for ops in (TritonOps(), TorchOps()))
    torch.testing.assert_close(got_NF, expected_NF, atol=1e-6, rtol=1e-5)


def test_a_gpu_has_kernels_and_a_cpu_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "triton_trouble", lambda _device: None)
    assert isinstance(choose_ops(torch.device("cpu")), TorchOps)
    assert isinstance(choose_ops(torch.device("cuda", 0)), TritonOps)


def test_where_the_first_kernel_runs_triton_is_used(device: torch.device) -> None:
    assert triton_trouble(device) is None


@pytest.mark.parametrize("failure", ["RuntimeError: Failed to find C compiler.", "OSError: no driver"])
def test_where_it_does_not_run_torch_does_it_all(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton calls a C compiler when a kernel is first run, and a machine without one failed in its first step."""

    def write_one(_device: torch.device) -> None:
        kind, text = failure.split(": ")
        raise {"RuntimeError": RuntimeError, "OSError": OSError}[kind](text)

    monkeypatch.setattr(trial, "write_one", write_one)
    assert triton_trouble(torch.device("cuda", 0)) == f"a first kernel did not run: {failure}"
    assert isinstance(choose_ops(torch.device("cuda", 0)), TorchOps)
    assert failure in caplog.text
