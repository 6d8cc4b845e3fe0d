"""The quickest way for each number of rows. The tests choose the timer's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.models.errors import UnsupportedModel
from engine.models.linear import GatedLinears, Linear, LinearFactory, PlainLinear
from engine.models.measured_linear import ROWS, MeasuredGated, MeasuredLinears


class Way:
    """A product that notes when it is called. It sums in the order of inputs, whatever this machine's libraries do for
    some number of rows."""

    def __init__(self, name: str, weight_OI: Tensor, bias_O: Tensor | None, called: list[str]) -> None:
        self.name = name
        self._weight_OI = weight_OI
        self._bias_O = torch.zeros(len(weight_OI)) if bias_O is None else bias_O
        self._called = called

    def __call__(self, x_NI: Tensor) -> Tensor:
        self._called.append(self.name)
        y_NO = self._bias_O.repeat(len(x_NI), 1)
        for x_N, weight_O in zip(x_NI.t(), self._weight_OI.t(), strict=True):
            y_NO += x_N[:, None] * weight_O
        return y_NO


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


def test_gated_products_are_measured_apart() -> None:
    called: list[str] = []
    plain, gated = make(Times((1, 2, 2)), called), make(Times((2, 2, 1)), called)
    linears = MeasuredGated(plain, gated)
    assert isinstance(linears, GatedLinears)
    assert used(linears(torch.rand(4, 6), None), called, 1) == "torch"
    assert used(linears.gated(torch.rand(4, 6), None), called, 1) == "b"
    about = linears.describe()
    assert (about["linear"], about["gated_linear"]) == ("4x6: torch 1-16", "4x6: b 1-16")


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
