"""The attention kernels, compiled for cards that need not be here. Nothing spills, shared memory suffices, loads are
wide and products use the matrix units. Every path through the kernel compiles."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.attention.parts import CHUNK
from engine.attention.tiles import TileShape, default_tiles, deterministic_tiles
from engine.attention.triton_backend import JOIN_ELEMENTS
from engine.runner.kv_pool import FP8
from tests.unit.engine.kernels.ahead_of_time import MOST_SPILLED, Build, Compiler, Constant, Report

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", FP8: "fp8e4nv"}
DIVISIBLE = (
    "out q kv scales pages query_starts kv_lens partials sums counters "
    "q_stride_row q_stride_head kv_stride_part kv_stride_head"
)
PARTS = ("part_starts", "item_splits", "slot_starts", "part_items")
WIDE_COPY = "LDGSTS.E.BYPASS.128"
CASES = [
    (dim, dtype, capability)
    for dim in (64, 128, 256)
    for dtype, capability in ((torch.bfloat16, 80), (torch.bfloat16, 90), (FP8, 90))
]


def attention(
    shape: TileShape, dim: int, kv: torch.dtype, capability: int, page_size: int = 16, **others: Constant
) -> Build:
    """A build with grouped heads, several tiles an item and splits. `others` replace constants."""
    q, s = (torch.bfloat16, torch.float16) if kv == FP8 else (kv, kv)
    block_d = max(16, triton.next_power_of_2(dim))
    constants: dict[str, Constant] = {
        "KV_HEADS": 8,
        "GROUP": 8,
        "DIM": dim,
        "BLOCK_D": block_d,
        "PAGE_SIZE": page_size,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "JOIN_D": min(block_d, JOIN_ELEMENTS * shape.num_warps // shape.block_m),
        "MAX_SPLITS": 32,
        "MIN_BLOCKS": 8,
        "SPLIT_BLOCKS": 0,
        "Q_FACTOR": 1,
        "COMPUTE": str({"bf16": "tl.bfloat16", "fp32": "tl.float32", "fp16": "tl.float16"}[NAMES[q]]),
        "SCORES": str({"bf16": "tl.bfloat16", "fp32": "tl.float32", "fp16": "tl.float16"}[NAMES[s]]),
        "HAS_SCALES": kv == FP8,
        "HAS_CAP": False,
        "HAS_WINDOW": False,
        "HAS_SINKS": False,
        "WIDE": False,
    }
    signature = {
        **dict.fromkeys(("out", "q"), "*" + NAMES[q]),
        "kv": "*" + NAMES[kv],
        **dict.fromkeys(("scales", "sinks", "partials", "sums"), "*fp32"),
        **dict.fromkeys(("pages", "query_starts", "kv_lens", *PARTS, "counters"), "*i32"),
        **dict.fromkeys(
            ("num_items", "q_stride_row", "q_stride_head", "kv_stride_head"),
            "i32",
        ),
        **dict.fromkeys(("pages_stride", "window"), "i32"),
        "kv_stride_part": "i64",
        **dict.fromkeys(("score_scale", "cap"), "fp32"),
    }
    return Build(
        "engine.kernels.paged_attention:paged_attention",
        signature,
        constants | others,
        capability,
        DIVISIBLE.split(),
        shape.num_warps,
        shape.num_stages,
        texts=True,
    )


def check(compiler: Compiler, builds: list[Build]) -> list[Report]:
    reports = compiler.build(builds)
    for one, report in zip(builds, reports, strict=True):
        assert report.spilled_bytes <= MOST_SPILLED, f"{one}: {report}"
        assert report.fits(one.capability), f"{one}: {report}"
        if one.signature["q"] != "*fp32":
            products = "HGMMA" if one.capability == 90 and one.constants["BLOCK_M"] != 16 else "HMMA"
            assert products in report.sass, f"{one}: no {products}"
            assert report.sass.count(WIDE_COPY) >= 8, f"{one}: copies are narrow"
    return reports


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_decodes_keep_enough_on_their_way(compiler: Compiler, dtype: torch.dtype) -> None:
    """Three programs run at once on a multiprocessor, each with a block of keys and values under way. That is 48 KB in
    fp8; an H100 needs some 40 KB by Little's law."""
    shape = default_tiles(128, dtype, 90).shapes[0]
    report = compiler.build([attention(shape, 128, dtype, 90)])[0]
    assert 3 * report.registers * 32 * shape.num_warps <= 65536
    assert 3 * (report.shared_bytes + 1024) <= 228 * 1024
    assert "F2F." not in report.sass, "such conversions are four times slower than others"


@pytest.mark.parametrize(("dim", "dtype", "capability"), CASES)
def test_defaults(compiler: Compiler, dim: int, dtype: torch.dtype, capability: int) -> None:
    """With and without splits, and with pages larger and smaller than a block. Either may take more registers."""
    builds = []
    for shape in default_tiles(dim, dtype, capability).shapes:
        for page_size, splits in ((16, 32), (128, 1)):
            builds.append(attention(shape, dim, dtype, capability, page_size, MAX_SPLITS=splits))
    check(compiler, builds)


@pytest.mark.parametrize("capability", [89, 120])
def test_cards_with_little_shared_memory(compiler: Compiler, capability: int) -> None:
    """Those of 12.0 came after Hopper's, and have no more of it than those of 8.9."""
    builds = [
        attention(default_tiles(dim, torch.bfloat16, capability).shapes[-1], dim, torch.bfloat16, capability)
        for dim in (128, 256)
    ]
    check(compiler, builds)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_deterministic_tiles(compiler: Compiler, dtype: torch.dtype) -> None:
    """Over windows both shapes have as many sums in their loops, since they sum in the same order. Without windows the
    wide one has a second loop."""
    tiles = deterministic_tiles(128, dtype, 90)
    builds = [
        attention(shape, 128, dtype, 90, SPLIT_BLOCKS=tiles.split_blocks, HAS_WINDOW=window, HAS_SINKS=window)
        for window in (False, True)
        for shape in tiles.shapes
    ]
    *_, narrow, wide = check(compiler, builds)
    for name in ("FADD", "FFMA"):
        assert narrow.sass.count(name) == wide.sass.count(name), name


def test_every_way_through_the_kernel(compiler: Compiler) -> None:
    narrow, *_, wide = default_tiles(128, torch.bfloat16, 90).shapes
    everything: dict[str, Constant] = {
        "HAS_CAP": True,
        "HAS_WINDOW": True,
        "HAS_SINKS": True,
        "Q_FACTOR": -1,
        "WIDE": True,
        "GROUP": 7,
    }
    check(
        compiler,
        [
            attention(narrow, 80, torch.float16, 90, 17, **everything),
            attention(wide, 96, torch.bfloat16, 90, 64, **everything),
            attention(narrow, 112, FP8, 90, 128, **everything),
            attention(default_tiles(64, torch.float32, 90).shapes[0], 64, torch.float32, 90, 3, **everything),
        ],
    )


@pytest.mark.parametrize(("pool", "kv"), [("bf16", "bf16"), ("fp8e4nv", "bf16"), ("fp32", "fp32")])
def test_writes(compiler: Compiler, pool: str, kv: str) -> None:
    constants: dict[str, Constant] = {"NUM_HEADS": 8, "DIM": 128, "BLOCK_D": 128, "ROWS": 16}
    signature = {
        **{"pool": "*" + pool, "scales": "*fp32", "kv": "*" + kv, "slots": "*i64"},
        **dict.fromkeys(("kv_stride_row", "kv_stride_part", "kv_stride_head", "pool_stride_head"), "i32"),
    }
    one = Build(
        "engine.kernels.kv_write:write_kv",
        signature,
        constants | {"HAS_SCALES": pool == "fp8e4nv"},
        90,
        tuple(signature),
        texts=True,
    )
    report = compiler.build([one])[0]
    assert report.spilled_bytes <= MOST_SPILLED
    assert "LDG.E.128" in report.sass
    assert "STG.E.128" in report.sass


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("items", "split_blocks"), [(1, 0), (64, 8), (1024, 0)])
def test_cutting_into_parts(compiler: Compiler, items: int, split_blocks: int, window: bool) -> None:
    constants: dict[str, Constant] = {
        "GROUP": 8, "LEAST_ROWS": 16, "MOST_ROWS": 2**31 - 1, "BLOCK_M": 128, "BLOCK_N": 64, "MIN_BLOCKS": 4,
        "MAX_SPLITS": 32, "SPLIT_BLOCKS": split_blocks, "HAS_WINDOW": window, "BLOCK_B": items, "CHUNK": CHUNK,
    }  # fmt: skip
    signature = {
        **dict.fromkeys((*PARTS, "query_starts", "kv_lens"), "*i32"),
        **dict.fromkeys(("num_items", "budget", "window"), "i32"),
    }
    report = compiler.build(
        [Build("engine.kernels.attention_parts:cut_into_parts", signature, constants, 90)]
    )[0]
    assert report.spilled_bytes <= MOST_SPILLED
    assert report.fits(90)
