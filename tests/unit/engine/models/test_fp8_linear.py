"""A model whose matrices stay in fp8, on the kernels. Times are the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from test_fp8_weights import FORMATS, PER_TENSOR, write_fp8
from test_loader import run_logits, write_config

from engine.kernels.fp8_few_rows import ROW_TILES, SUMS_ROWS
from engine.kernels.fp8_rows import TILES
from engine.models import fp8_linear, loader
from engine.models.config import parse_spec, read_config
from engine.models.device_linear import FixedLinears
from engine.models.errors import UnsupportedModel
from engine.models.fp8_linear import KeepingLinears, kernels
from engine.models.linear import PlainLinear
from engine.models.loader import load_model
from engine.models.quantized_matrix import QuantizedMatrix, stack_quantized
from engine.models.shares import Shares
from engine.models.weights import CheckpointWeights
from engine.settings import DeviceName, ModelSettings

CPU = torch.device("cpu")
KERNELS = [f"fp8_sums_{row.block_o}x{row.num_warps}" for row in ROW_TILES[-1:]]
KERNELS += [f"fp8_{tiles.block_o}x{tiles.block_n}" for tiles in TILES]
KEPT = [("DeepSeek's blocks", kernel) for kernel in (None, *KERNELS[:2])]
KEPT += [("one scale a matrix", kernel) for kernel in (None, KERNELS[1])]
KEPT += [("compressed, channel", kernel) for kernel in (None, *KERNELS)]
"""Formats and kernels. Once loaded, each row of the last two formats has a scale."""


def second_is_quickest(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The first is torch's."""
    return [float(place != 1) for place in range(len(calls))]


def only(kernel: str | None) -> Callable[[QuantizedMatrix], Iterator[tuple[str, int, fp8_linear.Kernel]]]:
    """Of all kernels one, or none."""
    return lambda matrix: (found for found in kernels(matrix) if found[0] == kernel)


@pytest.mark.parametrize("case", FORMATS)
def test_what_is_kept_is_what_is_meant(tmp_path: Path, case: str) -> None:
    meant = write_fp8(tmp_path, *FORMATS[case])
    spec = parse_spec(read_config(tmp_path))
    source = CheckpointWeights(tmp_path, spec, torch.float32, CPU)
    for name, expected in meant.items():
        matrix = source.take_quantized(name)
        assert (matrix is not None) == name.endswith("_proj.weight"), name
        if matrix is not None:
            assert matrix.values_OI.dtype == torch.float8_e4m3fn
            assert torch.equal(matrix.multiplied(torch.float32), expected), name
    source.close()


def test_a_rank_multiplies_out(tmp_path: Path) -> None:
    write_fp8(tmp_path, *FORMATS["one scale a matrix"])
    spec = parse_spec(read_config(tmp_path))
    source = CheckpointWeights(tmp_path, spec, torch.float32, CPU, Shares(spec, 0, 2))
    assert source.take_quantized("model.layers.0.self_attn.q_proj.weight") is None
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kernel"), KEPT)
def test_the_model_is_the_one_that_is_multiplied_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kernel: str | None
) -> None:
    """With each kernel in place of torch's product, for the three rows of the test. Sums take four at most."""
    monkeypatch.setattr(fp8_linear, "kernels", only(kernel))
    monkeypatch.setattr(fp8_linear, "FP8_ROWS", (1, 2, 4, 8))
    write_fp8(tmp_path, *FORMATS[case])
    linears = KeepingLinears(
        FixedLinears(PlainLinear, {"linear": "plain"}), torch.float32, second_is_quickest
    )
    device: DeviceName = "cuda" if torch.cuda.is_available() else "cpu"
    settings = ModelSettings(path=str(tmp_path), dtype="float32", device=device)
    found, expected = load_model(settings, linears), load_model(settings, linear="torch")
    assert found.keeps_quantized
    assert not expected.keeps_quantized
    torch.testing.assert_close(run_logits(found), run_logits(expected), rtol=1e-3, atol=1e-4)
    assert found.about["linear"] == "plain"
    if kernel is None or case == "DeepSeek's blocks":  # blocks of 24 columns, which no kernel takes
        assert "fp8_" not in found.about["fp8_linear"]
    else:
        most_rows = SUMS_ROWS if "sums" in kernel else 8
        assert f"{kernel} 1-{most_rows}" in found.about["fp8_linear"]


def test_blocks_that_differ_are_not_fused() -> None:
    values_OI = torch.ones(2, 32).to(torch.float8_e4m3fn)
    whole = QuantizedMatrix(values_OI, torch.ones(2, 1), 32)
    halves = QuantizedMatrix(values_OI, torch.ones(2, 2), 16)
    assert stack_quantized([whole, halves]) is None


def test_where_fp8_cannot_be_kept_it_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ModelSettings(str(tmp_path), load_format="dummy", device="cpu", keep_fp8=True)
    transformers.GPTNeoXConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model\.keep_fp8 is for native models .*gpt_neox"):
        load_model(settings)
    write_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="matrices are not in fp8"):
        load_model(settings)
    write_config(tmp_path, quantization_config=PER_TENSOR)
    with pytest.raises(UnsupportedModel, match=r"compute capability 8\.9, this is a CPU"):
        load_model(settings)
    for capability, reason in ((80, r"this is one with 8\.0"), (90, "not torch's: it was asked for")):
        monkeypatch.setattr(loader, "compute_capability", lambda _, found=capability: found)
        with pytest.raises(UnsupportedModel, match=reason):
            load_model(settings, linear="torch")
