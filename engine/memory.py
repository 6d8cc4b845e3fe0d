"""Memory that settings ask for and the machine does not have: the error names the settings, and what there was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.device import device_name, free_memory_bytes
from engine.host_memory import host_memory_bytes

MIB = 2**20


class MemoryShort(RuntimeError):
    """The settings ask for more memory than there is."""


def check_free(device: torch.device, size_bytes: int, what: str, setting: str) -> None:
    """Before an allocation: the kernel grants a CPU more than it has, and kills whoever uses it. Raises MemoryShort."""
    free_bytes = free_memory_bytes(device)
    if free_bytes is not None and size_bytes > free_bytes:
        raise MemoryShort(f"{what} takes {_mib(size_bytes)}; {_told(device, free_bytes)} ({setting})")


def check_host(size_bytes: int, what: str, setting: str) -> None:
    """Of what is allocated only later, as it is needed. Raises MemoryShort."""
    total_bytes = host_memory_bytes()
    if size_bytes > total_bytes:
        raise MemoryShort(
            f"{what} may take {_mib(size_bytes)}; this machine, or its container, has {_mib(total_bytes)} ({setting})"
        )


@contextmanager
def memory_for(device: torch.device, what: str, settings: str) -> Iterator[None]:
    """Where nobody can say beforehand how much it takes. Raises MemoryShort in place of torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = _told(device, free_memory_bytes(device) or 0)
        raise MemoryShort(f"there is no memory for {what}; {told} ({settings}): {error}") from error


def _told(device: torch.device, free_bytes: int) -> str:
    return f"{device_name(device)} has {_mib(free_bytes)} free"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"
