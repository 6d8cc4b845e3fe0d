"""The device and the dtype that settings name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device import (
    DeviceUnavailable,
    activation_dtype,
    resolve_device,
    resolve_dtype,
    seconds_of_each,
    send,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HAS_GPU = torch.cuda.is_available()


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if HAS_GPU else "cpu")


@pytest.mark.skipif(HAS_GPU, reason="has a GPU")
def test_no_gpu_is_said_plainly() -> None:
    with pytest.raises(DeviceUnavailable, match="no GPU"):
        resolve_device("cuda")


def test_dtypes() -> None:
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", GPU, torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("auto", GPU, torch.float16) == torch.float16
    assert resolve_dtype("float16", GPU, torch.bfloat16) == torch.float16
    assert resolve_dtype("bfloat16", CPU, torch.float32) == torch.bfloat16
    assert resolve_dtype("float32", GPU, torch.bfloat16) == torch.float32
    assert activation_dtype(CPU, torch.bfloat16) == torch.float32
    assert activation_dtype(GPU, torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("numbers", [[3, 1], np.array([3, 1])], ids=["list", "array"])
def test_numbers_reach_a_device_through_pinned_memory(
    numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch pins no tensor that it makes of an array. Every step with new pages would have failed on a GPU."""
    steps: list[str] = []

    def pinned(tensor: Tensor) -> Tensor:
        steps.append("pinned")
        return tensor

    def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        steps.append(f"to {device}, {non_blocking=}")
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", moved)
    assert send(numbers, torch.int64, GPU).tolist() == [3, 1]
    assert steps == ["pinned", "to cuda:0, non_blocking=True"]


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_who_reads_more_takes_longer() -> None:
    device = resolve_device("cuda")
    sizes = (2**28, 2**26, 2**27)
    tensors = [torch.zeros(size, device=device) for size in sizes]
    times_s = seconds_of_each(device, [tensor.sum for tensor in tensors])
    assert sorted(sizes) == [size for _, size in sorted(zip(times_s, sizes, strict=True))]
    assert all(size * 4 / taken_s < 2e13 for size, taken_s in zip(sizes, times_s, strict=True))
