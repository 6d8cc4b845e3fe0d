"""Which implementation of a product a device runs: the quickest for the number of rows. The tests choose the timer's
results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.cpu.library import Kernels, NoKernels, find_kernels
from engine.cpu.matrix import PackedLinears, PackedMatrix
from engine.models import device_linear
from engine.models.device_linear import ROWS, FixedLinears, MeasuredGated, MeasuredLinears, choose_linears
from engine.models.errors import UnsupportedModel
from engine.models.linear import CastingLinear, GatedLinears, Linear, LinearFactory, PlainLinear, SplitLinear
from engine.models.loader import load_model
from engine.settings import ModelSettings
from tests.unit.engine.cpu.builds import every_build, kernels_of
from tests.unit.engine.tiny_llama import TINY_LLAMA

ROOT = Path(__file__).parents[4]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Way:
    """A PlainLinear that notes when it is called."""

    def __init__(self, name: str, weight_OI: Tensor, bias_O: Tensor | None, called: list[str]) -> None:
        self.name = name
        self._plain = PlainLinear(weight_OI, bias_O)
        self._called = called

    def __call__(self, x_NI: Tensor) -> Tensor:
        self._called.append(self.name)
        return self._plain(x_NI)


class Times:
    """A timer. Each entry is for one of the timed numbers of rows, and has the seconds of all implementations in their
    order."""

    def __init__(self, *by_rows: Sequence[float]) -> None:
        self._by_rows = by_rows
        self.asked = 0

    def __call__(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times_s = list(self._by_rows[self.asked % len(self._by_rows)])[: len(calls)]
        self.asked += 1
        return times_s


def make(
    timer: Times, called: list[str], others: Sequence[str] = ("a", "b"), **more: LinearFactory
) -> MeasuredLinears:
    def way(name: str) -> LinearFactory:
        return lambda weight_OI, bias_O: Way(name, weight_OI, bias_O, called)

    return MeasuredLinears({name: way(name) for name in ("torch", *others)} | more, timer)


def used(linear: Linear, called: list[str], rows: int) -> str:
    called.clear()
    assert linear(torch.ones(rows, 6)).shape == (rows, 4)
    return "".join(called) or "torch"


def test_each_number_of_rows_goes_the_quickest_way() -> None:
    called: list[str] = []
    timer = Times((3, 2, 1), (3, 1, 2), (1, 2, 2), (3, 2, 1), (1, 1.01, 3))
    linears = make(timer, called)
    linear = linears(torch.rand(4, 6), None)
    ways = {rows: used(linear, called, rows) for rows in (0, *range(1, 20))}
    expected = {1: "b", 2: "a", 3: "torch", 4: "torch", 5: "b", 8: "b", 9: "torch", 16: "torch", 17: "torch"}
    assert {rows: ways[rows] for rows in expected} == expected
    about = linears.describe()
    assert about["linear"] == "4x6: b 1, a 2, torch 4, b 8, torch 16"
    assert "quickest" in about["linear_reason"]


def test_torch_stays_where_another_is_hardly_quicker() -> None:
    called: list[str] = []
    linears = make(Times((1.0, 0.99, 1.0)), called)
    assert used(linears(torch.rand(4, 6), None), called, 1) == "torch"
    assert linears.describe()["linear"] == "4x6: torch 1-16"


def test_a_shape_is_timed_once() -> None:
    called: list[str] = []
    timer = Times((2, 1, 3))
    linears = make(timer, called)
    for _ in range(3):
        linears(torch.rand(4, 6), None)
        assert timer.asked == len(ROWS)
    linears(torch.rand(4, 6), torch.rand(4))
    linears(torch.rand(6, 4), None)
    assert timer.asked == 3 * len(ROWS)
    assert linears.describe()["linear"] == "4x6: a 1-16; 4x6 + bias: a 1-16; 6x4: a 1-16"


def test_each_matrix_has_its_own_weights() -> None:
    linears = make(Times((2, 1, 3)), [])
    x_NI = torch.rand(2, 6)
    for _ in range(2):
        weight_OI, bias_O = torch.rand(4, 6), torch.rand(4)
        torch.testing.assert_close(linears(weight_OI, bias_O)(x_NI), x_NI @ weight_OI.t() + bias_O)


def test_a_way_that_fails_is_passed_over_with_its_reason() -> None:
    """Here it fails when it is called, like a kernel that asks for more than the card has."""
    called: list[str] = []

    def failing(_weight_OI: Tensor, _bias_O: Tensor | None) -> Linear:
        def call(_x_NI: Tensor) -> Tensor:
            raise RuntimeError("out of shared memory")

        return call

    linears = make(Times((2, 1)), called, others=(), broken=failing, a=PlainLinear)
    linears(torch.rand(4, 6), None)
    about = linears.describe()
    assert about["linear"] == "4x6: a 1-16"
    assert "not broken: RuntimeError: out of shared memory" in about["linear_reason"]


@pytest.mark.parametrize("wrong", [1.05, torch.nan])
def test_a_way_with_other_results_is_passed_over(wrong: float) -> None:
    def off(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return lambda x_NI: PlainLinear(weight_OI, bias_O)(x_NI) * wrong

    linears = make(Times((2, 1)), [], others=(), off=off)
    linears(torch.rand(4, 6), None)
    about = linears.describe()
    assert about["linear"] == "4x6: torch 1-16"
    assert "not off: " in about["linear_reason"]


def test_weights_of_zeros_are_no_reason_to_pass_over() -> None:
    """A rank may have such weights, if its part of the vocabulary is padding."""
    linears = make(Times((2, 1)), [], others=("a",))
    linears(torch.zeros(4, 6), None)
    assert linears.describe()["linear"] == "4x6: a 1-16"


def test_what_each_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    half, wide = torch.bfloat16, torch.float32
    early_launch = pytest.importorskip("engine.kernels.early_launch")
    monkeypatch.setattr(early_launch, "early_options", lambda _: {"EARLY": True})
    for trouble, kind in ((None, MeasuredGated), ("no compiler", MeasuredLinears)):
        monkeypatch.setattr(device_linear, "triton_trouble", lambda _, trouble=trouble: trouble)
        assert isinstance(choose_linears("auto", GPU, half, half), kind)
    asked = choose_linears("torch", GPU, half, half)
    assert isinstance(asked, FixedLinears)
    assert asked.describe() == {"linear": "torch", "linear_reason": "it was asked for"}
    other = choose_linears("auto", GPU, wide, wide)
    assert "float32" in other.describe()["linear_reason"]
    weight_OI = torch.rand(4, 6)
    assert isinstance(other(weight_OI, None), PlainLinear)
    assert isinstance(choose_linears("torch", CPU, wide, wide)(weight_OI, None), PlainLinear)
    assert isinstance(choose_linears("torch", CPU, half, wide)(weight_OI.to(half), None), CastingLinear)


def test_gated_products_are_measured_apart() -> None:
    called: list[str] = []
    plain, gated = make(Times((1, 2, 2)), called), make(Times((2, 2, 1)), called)
    linears = MeasuredGated(plain, gated)
    assert isinstance(linears, GatedLinears)
    assert used(linears(torch.rand(4, 6), None), called, 1) == "torch"
    assert used(linears.gated(torch.rand(4, 6), None), called, 1) == "b"
    about = linears.describe()
    assert (about["linear"], about["gated_linear"]) == ("4x6: torch 1-16", "4x6: b 1-16")


@every_build
def test_a_cpu_has_the_compiled_kernels(variant: str) -> None:
    kernels_of(variant)
    linears = choose_linears("auto", CPU, torch.float32, torch.float32)
    assert isinstance(linears(torch.rand(4, 6), None), PackedMatrix)
    assert linears.describe()["linear"] == "cpu"
    wide = choose_linears("auto", CPU, torch.bfloat16, torch.bfloat16)
    assert "bfloat16" in wide.describe()["linear_reason"]


def test_without_them_it_has_what_torch_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_linear, "find_kernels", lambda: NoKernels("there was no compiler"))
    linears = choose_linears("auto", CPU, torch.float32, torch.float32)
    assert isinstance(linears(torch.rand(4, 6), None), SplitLinear)
    assert linears.describe() == {"linear": "torch", "linear_reason": "there was no compiler"}


def test_deterministic_products_are_those_of_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.float32
    with pytest.raises(UnsupportedModel, match="torch's products depend on the number of rows"):
        choose_linears("torch", CPU, wide, wide, deterministic=True)
    monkeypatch.setattr(device_linear, "triton_trouble", lambda _: "no compiler")
    with pytest.raises(UnsupportedModel, match="needs Triton's kernels: no compiler"):
        choose_linears("auto", GPU, torch.bfloat16, torch.bfloat16, deterministic=True)
    if isinstance(find_kernels(), Kernels):
        with pytest.raises(UnsupportedModel, match=r"activations in torch\.bfloat16"):
            choose_linears("auto", CPU, torch.bfloat16, torch.bfloat16, deterministic=True)
    monkeypatch.setattr(device_linear, "find_kernels", lambda: NoKernels("there was no compiler"))
    with pytest.raises(UnsupportedModel, match="needs the compiled kernels: there was no compiler"):
        choose_linears("auto", CPU, wide, wide, deterministic=True)


@every_build
def test_deterministic_products_round_no_rows(variant: str) -> None:
    kernels_of(variant)
    linears = choose_linears("auto", CPU, torch.bfloat16, torch.float32, deterministic=True)
    assert isinstance(linears, PackedLinears)
    weight_OI, x_NI = torch.randn(32, 64).bfloat16(), torch.randn(40, 64)
    exact_NO = PlainLinear(weight_OI.float(), None)(x_NI)
    torch.testing.assert_close(linears(weight_OI, None)(x_NI), exact_NO, atol=1e-5, rtol=1e-5)


def test_what_was_chosen_is_told_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    settings = ModelSettings(str(tmp_path), load_format="dummy", device="cpu")
    assert load_model(settings, linear="torch").about["linear"] == "torch"
    assert load_model(settings).about["linear"] == ("cpu" if isinstance(find_kernels(), Kernels) else "torch")


def test_ways_that_must_be_exact() -> None:
    """The quickest for the most rows is taken for more, and a way that rounds otherwise for some number of rows is
    passed over."""
    called: list[str] = []

    def off_for_few(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        plain = Way("off", weight_OI, bias_O, called)
        return lambda x_NI: plain(x_NI) * (1.0 + 1e-7 * (x_NI.shape[0] == 4))

    ways = {name: partial(Way, name, called=called) for name in ("first", "a", "b")}
    makes = {**ways, "off": off_for_few}
    timer = Times((2, 1, 3), (2, 1, 3), (2, 1, 3), (2, 1, 3), (2, 3, 1))
    exact = MeasuredLinears(makes, timer, exact=True)
    exact_x = torch.ones(ROWS[-1], 6)
    linear = exact(torch.ones(4, 6), None)
    assert torch.equal(linear(exact_x), torch.full((ROWS[-1], 4), 6.0))
    assert [used(linear, called, rows) for rows in (1, 16, 17)] == ["a", "b", "b"]
    assert "not off: other bits (4 outputs, 4 rows)" in exact.describe()["linear_reason"]
    with pytest.raises(UnsupportedModel, match=r"execution\.deterministic: this device has other bits"):
        MeasuredLinears({"off": off_for_few}, timer, exact=True)(torch.ones(4, 6), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_card_sums_in_one_order(dtype: torch.dtype) -> None:
    linears = choose_linears("auto", GPU, dtype, dtype, deterministic=True)
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
    linears = choose_linears("auto", GPU, dtype, dtype)
    weight_OI, bias_O = torch.randn(4096, 1024).to(GPU, dtype), torch.randn(4096).to(GPU, dtype)
    linear = linears(weight_OI, bias_O)
    assert "not few" not in linears.describe()["linear_reason"]
    for rows in (1, 3, 16, 17):
        x_NI = torch.randn(rows, 1024).to(GPU, dtype)
        wide_NO = x_NI.double() @ weight_OI.double().t() + bias_O.double()
        torch.testing.assert_close(linear(x_NI).double(), wide_NO, atol=0.5, rtol=0.01)


def test_without_triton_torch_does_it_all() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from engine.models.device_linear import choose_linears\n"
        "linears = choose_linears('auto', torch.device('cuda', 0), torch.bfloat16, torch.bfloat16)\n"
        "print(linears.describe())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "triton is not installed" in done.stdout, done.stderr[-2000:]
