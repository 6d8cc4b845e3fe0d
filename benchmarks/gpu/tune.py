"""Tries tile sizes of the attention kernels, one parameter at a time from the defaults, and shows the best per case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from benchmarks.gpu.attention import decode_cases, extend_cases, mixed_case, verify_case
from benchmarks.gpu.attention_scene import Case, Scene
from benchmarks.gpu.stage import Stage
from engine.attention.tiles import AttentionTiles
from engine.attention.triton_backend import TritonAttention

CHOICES = {
    "block_n": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "programs": (1, 2, 4, 8, 16),
    "block_m": (16, 32, 64, 128),
}
"""Of the shape that the case uses."""

SPLITS = {"min_split": (128, 256, 512, 1024, 2048), "max_splits": (16, 32, 64, 128)}
ROUNDS = 2
REPEATS = 5
BETTER = 0.99
"""Less than one percent is noise."""


def run(stage: Stage) -> None:
    cases = [
        *decode_cases(stage.dry),
        *extend_cases(stage.dry),
        mixed_case(stage.dry),
        verify_case(stage.dry),
    ]
    cases.insert(1, replace(cases[0], kv_dtype="fp8"))
    cases = [case for case in cases[: 2 if stage.dry else None] if stage.wants(case.name)]
    for index, case in enumerate(cases):
        share_s = stage.left_s / (len(cases) - index)
        stage.attempt(case.name, partial(tune, stage, case, share_s))


def tune(stage: Stage, case: Case, seconds: float) -> None:
    """Takes whatever makes it faster, round by round, until nothing does or its time is over."""
    scene, end_s = Scene(stage, case), stage.left_s - seconds

    def time(tiles: AttentionTiles) -> float:
        return scene.time(partial(TritonAttention, tiles=tiles), REPEATS).median_s

    best = TritonAttention(scene.pool).tiles
    first_s = best_s = time(best)
    tried: list[dict[str, object]] = []
    for _ in range(1 if stage.dry else ROUNDS):
        improved = False
        for tiles in neighbours(best, case, stage.dry):
            if stage.left_s < end_s:
                break
            try:
                seconds_now = time(tiles)
            except Exception as error:  # tiles that do not fit the card
                tried.append({"tiles": asdict(tiles), "error": f"{type(error).__name__}: {error}"[:200]})
                continue
            tried.append({"tiles": asdict(tiles), "seconds": seconds_now})
            if seconds_now < BETTER * best_s:
                best, best_s, improved = tiles, seconds_now, True
        if not improved:
            break
    shape = best.shape(_rows(case))
    stage.row(
        f"{case.name}, {case.kv_dtype}", best_s * 1e6, "us", limit=first_s * 1e6, share=first_s / best_s,
        note=f"{shape} min_split {best.min_split} max_splits {best.max_splits}; limit is the defaults' time",
        details={"best": asdict(best), "tried": tried},
    )  # fmt: skip


def neighbours(tiles: AttentionTiles, case: Case, dry: bool) -> Iterator[AttentionTiles]:
    shape = tiles.shape(_rows(case))
    few = 2 if dry else None
    for name, values in CHOICES.items():
        for value in values[:few]:
            if value != getattr(shape, name):
                yield replace(tiles, shapes=(replace(shape, **{name: value}),))
    for name, values in SPLITS.items():
        for value in values[:few]:
            if value != getattr(tiles, name):
                yield replace(tiles, shapes=(shape,), **{name: value})


def _rows(case: Case) -> int:
    return max(case.query_lens) * case.heads.query // case.heads.kv
