"""Which attention backend a replica runs, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import (
    AttentionBackend,
    AttentionUnavailable,
    Queries,
    TableAttention,
)
from engine.attention.table_torch import TorchTables
from engine.attention.tables import ItemAttention
from engine.attention.torch_backend import TorchAttention
from engine.cpu.library import NoKernels, find_kernels
from engine.kernels.choose import triton_trouble
from engine.runner.kv_pool import KVPool
from engine.settings import AttentionName

GPU_ORDER = ("triton", "flash", "torch")
"""What auto tries on a GPU, in this order."""

CPU_ORDER = ("cpu", "torch")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionChoice:
    """One backend in its two forms: over a step's items, and over tables on the device. `reason` is a sentence for the
    log."""

    name: str
    reason: str
    items: AttentionBackend
    tables: TableAttention


@dataclass(frozen=True, slots=True)
class _Place:
    pool: KVPool
    device: torch.device
    sinks: int
    deterministic: Queries | None
    searches: bool
    """Whether the settings leave the choice to us."""


def choose_attention(
    name: AttentionName,
    pool: KVPool,
    device: torch.device,
    *,
    sinks: int = 0,
    deterministic: Queries | None = None,
) -> AttentionChoice:
    """The backend `name` over a pool that nothing has been written to yet; auto is the first that can run.

    `sinks` is the number of heads with attention sinks in the model's layers, 0 if there are none. With the queries of
    a model that is to be `deterministic` only a backend will do whose results do not depend on what else a step holds.
    Raises AttentionUnavailable with the reasons if the backend, or with auto every backend, cannot run.
    """
    place = _Place(pool, device, sinks, deterministic, name == "auto")
    if name != "auto":
        return _choice(name, "it was asked for", place)
    order = GPU_ORDER if device.type == "cuda" else CPU_ORDER
    passed_over: list[str] = []
    for candidate in order:
        reason = "; ".join(["the first that can run here", *passed_over])
        try:
            return _choice(candidate, reason, place)
        except AttentionUnavailable as error:
            passed_over.append(f"not {candidate}: {error.why}")
    raise AttentionUnavailable("auto", "; ".join(passed_over))


def _choice(name: str, reason: str, place: _Place) -> AttentionChoice:
    if name == "cpu":
        return AttentionChoice(name, reason, _cpu(place), TorchTables(place.pool))
    if place.deterministic is not None and name != "triton":
        raise AttentionUnavailable(
            name, "its sums depend on what else a step holds (execution.deterministic)"
        )
    if place.pool.layout.latent_dim is not None and name != "torch":
        raise AttentionUnavailable(name, "it has no latents")
    if name == "torch":
        return AttentionChoice(name, reason, TorchAttention(place.pool), TorchTables(place.pool))
    if name == "flash":
        tables = _flash(place)
    else:
        tables, prompts = _triton(place)
        reason += f"; {prompts}" if prompts else ""
    return AttentionChoice(name, reason, ItemAttention(tables, place.device), tables)


def _cpu(place: _Place) -> CpuAttention:
    if place.device.type != "cpu":
        raise AttentionUnavailable("cpu", "the model is on a GPU")
    kernels = find_kernels()
    if isinstance(kernels, NoKernels):
        raise AttentionUnavailable("cpu", kernels.reason)
    return CpuAttention(place.pool, kernels, deterministic=place.deterministic is not None)


def _flash(place: _Place) -> TableAttention:
    if place.device.type != "cuda":
        raise AttentionUnavailable("flash", "it needs a GPU")
    from engine.attention.flash_backend import FlashAttention, find_flash

    flash = find_flash()
    if triton_trouble(place.device) is not None:
        return FlashAttention(place.pool, flash, place.sinks)
    from engine.attention.kv_writer import write_rows

    return FlashAttention(place.pool, flash, place.sinks, write_rows)


def _triton(place: _Place) -> tuple[TableAttention, str]:
    """With what prompts are quickest on if the settings leave it to us, and a clause that says what that is. Where bits
    must be equal, prompts are not left to others."""
    trouble = triton_trouble(place.device)
    if trouble is not None:
        raise AttentionUnavailable("triton", trouble)
    from engine.attention.triton_backend import TritonAttention

    if place.deterministic is not None:
        from engine.attention.bits_trial import check_bits

        check_bits(place.pool, place.deterministic)
        return TritonAttention(place.pool, deterministic=True), "splits of one length, bits compared at start"
    if not place.searches:
        return TritonAttention(place.pool), ""
    from engine.attention.prompt_trial import try_prompts

    prompts, reason = try_prompts(place.pool, place.sinks)
    return TritonAttention(place.pool, prompts=prompts), reason
