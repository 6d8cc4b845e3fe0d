"""Which implementation of a product a device runs: the quickest for the number of rows. The tests choose the timer's
results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.cpu.library import Kernels, NoKernels, find_kernels
from engine.cpu.matrix import PackedLinears, PackedMatrix
from engine.models import device_linear
from engine.models.device_linear import FixedLinears, choose_linears
from engine.models.errors import UnsupportedModel
from engine.models.linear import CastingLinear, GatedLinears, PlainLinear, SplitLinear
from engine.models.loader import load_model
from engine.models.measured_linear import MeasuredGated, MeasuredLinears
from engine.settings import ModelSettings
from tests.unit.engine.cpu.builds import every_build, kernels_of
from tests.unit.engine.tiny_llama import TINY_LLAMA

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_what_each_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    half, wide = torch.bfloat16, torch.float32
    early_launch = pytest.importorskip("engine.kernels.early_launch")
    monkeypatch.setattr(early_launch, "early_options", lambda _: {"EARLY": True})
    for trouble, kind in ((None, MeasuredGated), ("no compiler", MeasuredLinears)):
        monkeypatch.setattr(device_linear, "triton_trouble", lambda _, trouble=trouble: trouble)
        assert isinstance(choose_linears("auto", GPU, half), kind)
    asked = choose_linears("torch", GPU, half)
    assert isinstance(asked, FixedLinears)
    assert asked.describe() == {"linear": "torch", "linear_reason": "it was asked for"}
    other = choose_linears("auto", GPU, wide)
    assert "float32" in other.describe()["linear_reason"]
    weight_OI = torch.rand(4, 6)
    assert isinstance(other(weight_OI, None), PlainLinear)
    assert isinstance(choose_linears("torch", CPU, wide)(weight_OI, None), PlainLinear)
    assert isinstance(choose_linears("torch", CPU, half)(weight_OI.to(half), None), CastingLinear)


@every_build
def test_a_cpu_has_the_compiled_kernels(variant: str) -> None:
    kernels_of(variant)
    linears = choose_linears("auto", CPU, torch.float32)
    assert isinstance(linears(torch.rand(4, 6), None), PackedMatrix)
    assert linears.describe()["linear"] == "cpu"


def test_without_them_it_has_what_torch_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_linear, "find_kernels", lambda: NoKernels("there was no compiler"))
    linears = choose_linears("auto", CPU, torch.float32)
    assert isinstance(linears(torch.rand(4, 6), None), SplitLinear)
    assert linears.describe() == {"linear": "torch", "linear_reason": "there was no compiler"}


def test_deterministic_products_are_those_of_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.float32
    with pytest.raises(UnsupportedModel, match="torch's products depend on the number of rows"):
        choose_linears("torch", CPU, wide, deterministic=True)
    monkeypatch.setattr(device_linear, "triton_trouble", lambda _: "no compiler")
    with pytest.raises(UnsupportedModel, match="needs Triton's kernels: no compiler"):
        choose_linears("auto", GPU, torch.bfloat16, deterministic=True)
    monkeypatch.setattr(device_linear, "find_kernels", lambda: NoKernels("there was no compiler"))
    with pytest.raises(UnsupportedModel, match="needs the compiled kernels: there was no compiler"):
        choose_linears("auto", CPU, wide, deterministic=True)


@every_build
def test_deterministic_products_round_no_rows(variant: str) -> None:
    kernels_of(variant)
    linears = choose_linears("auto", CPU, torch.bfloat16, deterministic=True)
    assert isinstance(linears, PackedLinears)
    weight_OI, x_NI = torch.randn(32, 64).bfloat16(), torch.randn(40, 64)
    exact_NO = PlainLinear(weight_OI.float(), None)(x_NI)
    torch.testing.assert_close(linears(weight_OI, None)(x_NI), exact_NO, atol=1e-5, rtol=1e-5)


def test_what_was_chosen_is_told_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    settings = ModelSettings(str(tmp_path), load_format="dummy", device="cpu")
    assert load_model(settings, linear="torch").about["linear"] == "torch"
    assert load_model(settings).about["linear"] == ("cpu" if isinstance(find_kernels(), Kernels) else "torch")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_card_sums_in_one_order(dtype: torch.dtype) -> None:
    linears = choose_linears("auto", GPU, dtype, deterministic=True)
    assert isinstance(linears, GatedLinears)
    weight_OI, bias_O = torch.randn(2048, 512).to(GPU, dtype), torch.randn(2048).to(GPU, dtype)
    x_NI = torch.randn(3000, 512).to(GPU, dtype)
    for linear in (linears(weight_OI, bias_O), linears.gated(weight_OI, bias_O)):
        all_NO = linear(x_NI)
        for rows in (1, 5, 16, 17, 90, 513, 2500):
            assert torch.equal(linear(x_NI[:rows]), all_NO[:rows]), rows
    assert "other bits" not in str(linears.describe())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_card_times_every_way(dtype: torch.dtype) -> None:
    linears = choose_linears("auto", GPU, dtype)
    weight_OI, bias_O = torch.randn(4096, 1024).to(GPU, dtype), torch.randn(4096).to(GPU, dtype)
    linear = linears(weight_OI, bias_O)
    assert "not few" not in linears.describe()["linear_reason"]
    for rows in (1, 3, 16, 17):
        x_NI = torch.randn(rows, 1024).to(GPU, dtype)
        wide_NO = x_NI.double() @ weight_OI.double().t() + bias_O.double()
        torch.testing.assert_close(linear(x_NI).double(), wide_NO, atol=0.5, rtol=0.01)
