"""How to pick the token of each row of logits on the device, and a picker made of torch's own operators.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.api import SamplingParams
from engine.runner.sampler import candidates, inverse_cdf


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Lies on the device, at addresses that a CUDA graph can rely on. At least R entries each.

    As in SamplingParams: `temperature_R` 0 is greedy, `top_k_R` 0, `top_p_R` 1 and `min_p_R` 0 are off. `point_R` is
    the row's random number in [0, 1).
    """

    temperature_R: Tensor
    """float32"""
    top_k_R: Tensor
    """int32"""
    top_p_R: Tensor
    """float32"""
    min_p_R: Tensor
    """float32"""
    point_R: Tensor
    """float32"""


class RowPicker(Protocol):
    def __call__(self, logits_RV: Tensor, table: SampleTable, out_R: Tensor) -> None:
        """Writes each row's token to `out_R` (int64)."""


def pick_by_row(logits_RV: Tensor, table: SampleTable, out_R: Tensor) -> None:
    """A RowPicker that goes to the host for every row: the reference, and for devices without Triton."""
    columns = (table.temperature_R, table.top_k_R, table.top_p_R, table.min_p_R, table.point_R)
    rows = zip(*(column[: len(out_R)].tolist() for column in columns), strict=True)
    for index, (temperature, top_k, top_p, min_p, point) in enumerate(rows):
        logits_V = logits_RV[index].float()
        if temperature == 0.0:
            out_R[index] = logits_V.argmax()
            continue
        params = SamplingParams(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
        probs_C, ids_C = candidates(logits_V, params)
        pick = inverse_cdf(probs_C, point)
        out_R[index] = pick if ids_C is None else ids_C[pick]
