"""Tries tile sizes of the attention kernels and of the products of few rows, one parameter at a time from the defaults,
and shows the best per case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from benchmarks.gpu.attention import decode_cases, extend_cases, mixed_case, verify_case
from benchmarks.gpu.attention_scene import Case, Scene
from benchmarks.gpu.products import DRY_SHAPES, SHAPES, Product, way_of
from benchmarks.gpu.stage import Stage
from engine.attention.tiles import AttentionTiles
from engine.attention.triton_backend import TritonAttention
from engine.kernels.few_rows import TILES, RowTiles

T = TypeVar("T", AttentionTiles, RowTiles)

CHOICES = {
    "block_n": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "programs": (1, 2, 4, 8, 16),
    "block_m": (16, 32, 64, 128),
}
"""Choices for the tile shape that the case uses."""

MIN_SPLITS, MAX_SPLITS = (128, 256, 512, 1024, 2048), (16, 32, 64, 128)
ROW_CHOICES = {
    "block_o": (16, 32, 64, 128),
    "block_i": (32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (3, 4, 5, 6, 8),
}
"""Choices for the tiles of products."""

TUNED_ROWS = (1, 8)
ROUNDS = 2
REPEATS = 5
BETTER = 0.99
"""An improvement of less than one percent is noise."""


def run(stage: Stage) -> None:
    cases = [
        *decode_cases(stage.dry),
        *extend_cases(stage.dry),
        mixed_case(stage.dry),
        verify_case(stage.dry),
    ]
    cases.insert(1, replace(cases[0], kv_dtype="fp8"))
    shapes = DRY_SHAPES if stage.dry else SHAPES
    parts: list[tuple[str, Callable[[float], None]]] = [
        (case.name, partial(tune, stage, case)) for case in cases[: 2 if stage.dry else None]
    ]
    parts += [
        (f"product {name}", partial(tune_product, stage, f"product {name}", shape))
        for name, shape in list(shapes.items())[: 1 if stage.dry else None]
    ]
    parts = [(name, part) for name, part in parts if stage.wants(name)]
    for index, (name, part) in enumerate(parts):
        stage.attempt(name, partial(part, stage.left_s / (len(parts) - index)))


def tune(stage: Stage, case: Case, seconds: float) -> None:
    scene, end_s = Scene(stage, case), stage.left_s - seconds

    def time(tiles: AttentionTiles) -> float:
        return scene.time(partial(TritonAttention, tiles=tiles), REPEATS).median_s

    first = TritonAttention(scene.pool).tiles
    found = search(stage, [first], lambda tiles: neighbours(tiles, case, stage.dry), time, end_s)
    best = found.best
    report(
        stage,
        f"{case.name}, {case.kv_dtype}",
        found,
        f"{best.shape(_rows(case))} min_split {best.min_split} max_splits {best.max_splits}",
    )


def tune_product(stage: Stage, name: str, shape: tuple[int, int], seconds: float) -> None:
    product, begin_s = Product(stage, *shape), stage.left_s
    for index, rows in enumerate(TUNED_ROWS):

        def time(tiles: RowTiles, rows: int = rows) -> float:
            return product.time(way_of(tiles), rows, REPEATS).timing.median_s

        end_s = begin_s - seconds * (index + 1) / len(TUNED_ROWS)
        found = search(stage, TILES, lambda tiles: row_neighbours(tiles, stage.dry), time, end_s)
        report(stage, f"{name}, {rows} row{'s' * (rows > 1)}", found, str(found.best))


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """The best tiles and their time, and the best time of the defaults."""

    best: T
    best_s: float
    first_s: float
    tried: list[dict[str, Any]]


def search(
    stage: Stage,
    defaults: Iterable[T],
    around: Callable[[T], Iterable[T]],
    time: Callable[[T], float],
    end_s: float,
) -> Found[T]:
    """Adopts every change that makes it faster, round by round, until none does or less than `end_s` is left."""
    first_s, best = min(((time(tiles), tiles) for tiles in defaults), key=lambda pair: pair[0])
    best_s = first_s
    tried: list[dict[str, Any]] = []
    for _ in range(1 if stage.dry else ROUNDS):
        improved = False
        for tiles in around(best):
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
    return Found(best, best_s, first_s, tried)


def report(stage: Stage, item: str, found: Found[T], note: str) -> None:
    stage.row(
        item, found.best_s * 1e6, "us", limit=found.first_s * 1e6, share=found.first_s / found.best_s,
        note=f"{note}; limit is the defaults' time", details={"best": asdict(found.best), "tried": found.tried},
    )  # fmt: skip


def row_neighbours(tiles: RowTiles, dry: bool) -> Iterator[RowTiles]:
    for name, values in ROW_CHOICES.items():
        for value in values[: 2 if dry else None]:
            if value != getattr(tiles, name):
                yield replace(tiles, **{name: value})


def neighbours(tiles: AttentionTiles, case: Case, dry: bool) -> Iterator[AttentionTiles]:
    """Tiles with one constant changed: of the shape that the case's longest item takes, or of the splits. The
    narrowest shape stays: decodes beside long items take it."""
    narrow, shape = tiles.shapes[0], tiles.shape(_rows(case))
    few = 2 if dry else None
    for name, values in CHOICES.items():
        for value in values[:few]:
            if value != getattr(shape, name):
                changed = replace(shape, **{name: value})
                beside = (narrow,) if changed.block_m > narrow.block_m and shape is not narrow else ()
                yield replace(tiles, shapes=(*beside, changed))
    splits = [replace(tiles, min_split=value) for value in MIN_SPLITS[:few]]
    splits += [replace(tiles, max_splits=value) for value in MAX_SPLITS[:few]]
    yield from (each for each in splits if each != tiles)


def _rows(case: Case) -> int:
    return max(case.query_lens) * case.heads.query // case.heads.kv
