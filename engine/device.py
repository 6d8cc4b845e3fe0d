"""Where the model lives. The only file that names torch.cuda (graph capture aside)."""

from __future__ import annotations

import torch

from engine.settings import DeviceName, DTypeName


class DeviceUnavailable(RuntimeError):
    """The settings ask for a device that this machine does not have."""


def resolve_device(name: DeviceName) -> torch.device:
    """auto is the first GPU if there is one, else the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnavailable("device 'cuda' was asked for, but torch sees no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: DTypeName, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype weights are held in. auto: float32 on a CPU, the checkpoint's own elsewhere."""
    if name == "float32":
        return torch.float32
    if name == "bfloat16":
        return torch.bfloat16
    if device.type == "cpu":
        return torch.float32
    return checkpoint if checkpoint in (torch.float32, torch.bfloat16) else torch.bfloat16


def activation_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """The dtype of activations and KV. A CPU computes in float32 whatever its weights are held in: its
    bfloat16 attention is several times slower."""
    return torch.float32 if device.type == "cpu" else weights


def use_cpu_threads(count: int | None) -> None:
    """How many threads one CPU operator may use, process-wide; None leaves torch's own choice."""
    if count is not None:
        torch.set_num_threads(count)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None on a CPU, where the pool is sized by settings alone."""
    if device.type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return int(free)


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
