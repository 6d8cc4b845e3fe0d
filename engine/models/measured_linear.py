"""The quickest of several ways to multiply by a matrix, found by timing, for each shape and number of rows.

How near a library's product of one row comes to the speed of memory depends on GPU, shape and version. So every way is
timed at start, on the weights at hand.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor

from engine.models.errors import UnsupportedModel
from engine.models.linear import Linear, LinearFactory

TORCH = "torch"

ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows that are timed. The result for one also holds for smaller numbers, down to the one before: steps are
padded in this way."""

BETTER = 0.98
"""Another way than torch's must take at most this share of its time."""

EARLY_BETTER = 1.03
"""The same for kernels that start while the one before them ends. One behind another they take less than was timed: on
an H200 those of a decode of one row took 3.72 ms in place of 3.83."""

MOST_APART = 0.02
"""The most by which another way may differ from torch's, as a share of the result's norm. Both round once, which makes
a few tenths of a percent."""

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Seconds of each call, while no cache has the weights."""


class MeasuredLinears:
    """For each shape of matrix and each number of rows, the quickest of `ways`. The first, torch's as a rule, works for
    any number of rows, the others for as many as are timed. A way that fails on the weights at hand, or whose results
    differ from the first's, is passed over.

    With `exact` all give a row the same bits, for any number of rows: this is checked. The quickest for the most rows
    that are timed is then taken for more too."""

    def __init__(
        self,
        ways: Mapping[str, LinearFactory],
        timer: Timer,
        rows: tuple[int, ...] = ROWS,
        better: float = BETTER,
        *,
        exact: bool = False,
    ) -> None:
        self._ways = ways
        self._timer = timer
        self._rows = rows
        self._better = better
        self._exact = exact
        self._chosen: dict[tuple[int, int, bool], list[str]] = {}
        """Names of ways, in the order of rows, by shape and whether there is a bias."""
        self._passed_over: dict[str, str] = {}
        self._spent_s = 0.0

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        outputs, inputs = weight_OI.shape
        makes = {name: partial(make, weight_OI, bias_O) for name, make in self._ways.items()}
        return self.choose((outputs, inputs, bias_O is not None), weight_OI.dtype, weight_OI.device, makes)

    def choose(
        self,
        shape: tuple[int, int, bool],
        dtype: torch.dtype,
        device: torch.device,
        makes: Mapping[str, Callable[[], Linear]],
        most_rows: Mapping[str, int] = MappingProxyType({}),
    ) -> Linear:
        """The quickest of `makes` for one matrix: its outputs, inputs and whether there is a bias. `dtype` is that of
        rows. Those in `most_rows` are not tried for more. Raises UnsupportedModel if the results must be exact, and
        those of the first are not."""
        if shape not in self._chosen:
            begin_s = time.perf_counter()
            self._chosen[shape] = self._quickest(shape[1], dtype, device, makes, most_rows)
            self._spent_s += time.perf_counter() - begin_s
        chosen = self._chosen[shape]
        many = chosen[-1] if self._exact else next(iter(makes))
        made = {name: makes[name]() for name in {many, *chosen}}
        if len(made) == 1:
            return made[many]
        return LinearByRows([made[name] for name in chosen], made[many], self._rows)

    def describe(self) -> dict[str, str]:
        shapes = []
        for (outputs, inputs, biased), chosen in self._chosen.items():
            runs = []
            for name, run in groupby(zip(chosen, self._rows, strict=True), lambda pair: pair[0]):
                rows = [rows for _, rows in run]
                runs.append(f"{name} {rows[0]}-{rows[-1]}" if len(rows) > 1 else f"{name} {rows[0]}")
            shapes.append(f"{outputs}x{inputs}{' + bias' if biased else ''}: {', '.join(runs)}")
        of_what = "of those with the same bits" if self._exact else f"{TORCH} for more"
        reasons = [f"by rows the quickest here, found in {self._spent_s:.1f} s; {of_what}"]
        reasons += [f"not {name}: {reason}" for name, reason in self._passed_over.items()]
        return {"linear": "; ".join(shapes), "linear_reason": "; ".join(reasons)}

    def _quickest(
        self,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        makes: Mapping[str, Callable[[], Linear]],
        most_rows: Mapping[str, int],
    ) -> list[str]:
        generator = torch.Generator(device).manual_seed(1)
        x_NI = torch.randn((self._rows[-1], inputs), generator=generator, dtype=dtype, device=device)
        first, *others = makes
        linears = {first: makes[first]()}
        if self._exact and not self._agrees(first, linears[first], linears[first], x_NI):
            raise UnsupportedModel(f"execution.deterministic: this device has {self._passed_over[first]}")
        linears |= {
            name: linear
            for name in others
            if self._agrees(name, linear := makes[name](), linears[first], x_NI[: most_rows.get(name)])
        }
        chosen = []
        for rows in self._rows:
            tried = {name: linear for name, linear in linears.items() if rows <= most_rows.get(name, rows)}
            times_s = self._timer([partial(linear, x_NI[:rows]) for linear in tried.values()])
            times_s[0] *= self._better
            chosen.append(min(zip(times_s, tried, strict=True))[1])
        return chosen

    def _agrees(self, name: str, linear: Linear, reference: Linear, x_NI: Tensor) -> bool:
        """Compares results for the most rows and for one; for all numbers that are timed if they must be exact. If they
        differ, it notes why."""
        try:
            all_NO = reference(x_NI)
            for rows in self._rows if self._exact else (len(x_NI), 1):
                result_NO, expected_NO = linear(x_NI[:rows]), all_NO[:rows]
                if not (torch.equal if self._exact else _near)(result_NO, expected_NO):
                    what = "bits" if self._exact else "results"
                    self._passed_over[name] = f"other {what} ({expected_NO.shape[1]} outputs, {rows} rows)"
                    return False
        except Exception as error:
            if self._exact and isinstance(error, torch.OutOfMemoryError):
                raise
            self._passed_over[name] = f"{type(error).__name__}: {error}"
            return False
        return True


def _near(result_NO: Tensor, expected_NO: Tensor) -> bool:
    wide_NO = expected_NO.float()
    return bool((result_NO.float() - wide_NO).norm() <= MOST_APART * wide_NO.norm())


class MeasuredGated:
    """Both Linears and GatedLinears, each measured for itself."""

    def __init__(self, plain: MeasuredLinears, gated: MeasuredLinears) -> None:
        self._plain = plain
        self._gated = gated

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._plain(weight_OI, bias_O)

    def gated(self, gate_up_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._gated(gate_up_OI, bias_O)

    def describe(self) -> Mapping[str, str]:
        gated = {f"gated_{name}": text for name, text in self._gated.describe().items()}
        return {**self._plain.describe(), **gated}


class LinearByRows:
    """`few` in the order of `rows`, `many` for more rows."""

    def __init__(self, few: Sequence[Linear], many: Linear, rows: Sequence[int]) -> None:
        bounds = (0, *rows)
        self._few = [few[0]]  # for no rows
        for linear, below, up_to in zip(few, bounds, rows, strict=False):
            self._few += [linear] * (up_to - below)
        self._many = many

    def __call__(self, x_NI: Tensor) -> Tensor:
        rows = x_NI.shape[0]
        return (self._few[rows] if rows < len(self._few) else self._many)(x_NI)
