"""Our paged attention against its limits: for decode the bytes of KV over the copy bandwidth, for extend the rate of
the fastest library that this machine has, over keys and values that are contiguous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.gpu.attention_libraries import library_rates
from benchmarks.gpu.attention_scene import Case, Heads, Scene
from benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from benchmarks.gpu.stage import Stage
from engine.attention.interface import TableAttention
from engine.attention.prompt_trial import TOKENS, try_prompts
from engine.attention.triton_backend import TritonAttention
from engine.runner.kv_pool import KVPool

DECODE_TARGET, RAGGED_TARGET = 0.85, 0.75
EXTEND_TARGET = 0.60


def decode_case(batch: int, length: int, heads: Heads) -> Case:
    return Case(f"decode {batch} × {length:,}", (1,) * batch, (length,) * batch, heads)


def extend_case(batch: int, new: int, length: int, heads: Heads) -> Case:
    history = f" on {length - new:,}" if length > new else ""
    return Case(f"extend {batch} × {new:,}{history}", (new,) * batch, (length,) * batch, heads)


def decode_cases(dry: bool) -> list[Case]:
    """The first case is the one with a target."""
    if dry:
        return [decode_case(2, 40, Heads(4, 2, 16))]
    return [decode_case(batch, length, Heads()) for batch, length in ((64, 8192), (8, 32_768), (1, 131_072))]


def extend_cases(dry: bool) -> list[Case]:
    if dry:
        return [extend_case(2, 12, 12, Heads(4, 2, 16)), extend_case(1, 5, 25, Heads(4, 2, 16))]
    shapes = ((8, 2048, 2048), (1, 8192, 8192), (1, 512, 8704), (8, 512, 8704))
    return [extend_case(*shape, Heads()) for shape in shapes]


def ragged_case(dry: bool) -> Case:
    """Decodes of short sessions beside one long session's."""
    if dry:
        return Case("ragged decode 3 + 1", (1,) * 4, (8, 8, 8, 90), Heads(4, 2, 16))
    return Case("ragged decode: 63 × 512, 1 × 32,768", (1,) * 64, (512,) * 63 + (32_768,))


def ragged_mixed_case(dry: bool) -> Case:
    """A normal step: decodes of many lengths beside one turn's prompt after a long history."""
    if dry:
        return Case("ragged mixed 3 + 1", (1, 1, 1, 6), (8, 30, 90, 46), Heads(4, 2, 16))
    lengths = tuple(256 << (index % 8) for index in range(63))
    return Case(
        "ragged mixed: 63 decodes on 256 to 32,768, 64 new on 32,768", (1,) * 63 + (64,), (*lengths, 32_832)
    )


def mixed_case(dry: bool) -> Case:
    if dry:
        return Case("mixed 2 + 1", (1, 1, 6), (20, 30, 16), Heads(4, 2, 16))
    return Case(
        "mixed: 60 decodes at 4,096, 4 × 512 new on 2,048", (1,) * 60 + (512,) * 4, (4096,) * 60 + (2560,) * 4
    )


def verify_case(dry: bool) -> Case:
    """A step of speculation: a few tokens of each sequence."""
    if dry:
        return Case("verify 2 × 4", (4,) * 2, (33,) * 2, Heads(4, 2, 16))
    return Case("verify 64 × 8 on 4,096", (8,) * 64, (4104,) * 64)


def turn_case(dry: bool) -> Case:
    """One session's turn in a captured step, which has room for as many items as tokens."""
    if dry:
        return Case("turn 5 on 40", (5,), (45,), Heads(4, 2, 16), spare_items=4)
    return Case("turn of 64 on 32,768, captured", (64,), (32_832,), spare_items=63)


def run(stage: Stage) -> None:
    ceilings = measure_ceilings(stage)
    parts: list[tuple[Case, Callable[[Case], None]]] = []
    for number, case in enumerate(decode_cases(stage.dry)):
        target = DECODE_TARGET if number == 0 else None
        both = (case, replace(case, kv_dtype="fp8"))
        parts += [(each, partial(decode, stage, ceilings, target)) for each in both]
    parts.append((ragged_case(stage.dry), partial(decode, stage, ceilings, RAGGED_TARGET)))
    extends = extend_cases(stage.dry)
    parts += [(case, partial(extend, stage, EXTEND_TARGET)) for case in extends]
    parts.append((replace(extends[0], kv_dtype="fp8"), partial(extend, stage, None)))
    mixed = (
        mixed_case(stage.dry),
        ragged_mixed_case(stage.dry),
        verify_case(stage.dry),
        turn_case(stage.dry),
    )
    parts += [(case, partial(together, stage, ceilings)) for case in mixed]
    for case, part in parts:
        if stage.wants(_name(case)):
            stage.attempt(_name(case), partial(part, case))


def decode(stage: Stage, ceilings: Ceilings, target: float | None, case: Case) -> None:
    scene = Scene(stage, case)
    timing = scene.time(TritonAttention)
    rate = case.kv_bytes / timing.median_s
    stage.row(
        _name(case), rate / 1e9, "GB/s", limit=ceilings.copy / 1e9, share=rate / ceilings.copy, target=target,
        note=f"{timing.median_s * 1e6:,.0f} us by {timing.by}, error {scene.error:.1e}",
        details={"bytes": case.kv_bytes, "seconds": timing.median_s, "best_s": timing.best_s, "error": scene.error},
    )  # fmt: skip


def extend(stage: Stage, target: float | None, case: Case) -> None:
    """By what a replica would take for prompts, and by our own kernels alone."""
    scene = Scene(stage, case)
    others = library_rates(stage, case)
    best = max(others.values())
    rates = ", ".join(f"{name} {each / 1e12:.0f}" for name, each in others.items())
    prompts, reason = try_prompts(scene.pool, tokens=32 if stage.dry else TOKENS)
    ways: dict[str, Callable[[KVPool], TableAttention]] = {
        "": partial(TritonAttention, prompts=prompts),
        ", our own kernels": TritonAttention,
    }
    for name, make in ways.items():
        timing = scene.time(make)
        rate = case.operations / timing.median_s
        stage.row(
            _name(case) + name, rate / 1e12, "TFLOP/s", limit=best / 1e12, share=rate / best,
            target=None if name else target,
            note=f"{timing.median_s * 1e6:,.0f} us, error {scene.error:.1e}; {rates}; {reason}",
            details={"operations": case.operations, "seconds": timing.median_s, "error": scene.error, "others": others},
        )  # fmt: skip


def together(stage: Stage, ceilings: Ceilings, case: Case) -> None:
    """The floor is the longer of reading all KV once and doing all operations at the matrix rate."""
    scene = Scene(stage, case)
    timing = scene.time(TritonAttention)
    floor_s = max(case.kv_bytes / ceilings.copy, case.operations / ceilings.bf16)
    stage.row(
        _name(case), timing.median_s * 1e6, "us", limit=floor_s * 1e6, share=floor_s / timing.median_s,
        note=f"by {timing.by}, error {scene.error:.1e}; limit is the floor",
        details={"bytes": case.kv_bytes, "operations": case.operations, "error": scene.error},
    )  # fmt: skip


def _name(case: Case) -> str:
    return f"{case.name}, {'fp8' if case.kv_dtype == 'fp8' else 'bf16'} KV"
