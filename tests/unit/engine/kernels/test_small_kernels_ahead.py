"""The small kernels compile for sm_80 and sm_90. Nothing is spilled, and memory moves 16 bytes at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from engine.kernels.sampling import BLOCK_TILES, GROUP, PICK_WARPS, SURVEY_TILES, TILE
from tests.unit.engine.kernels.ahead_of_time import MOST_SPILLED, Build, Compiler, Report

VOCAB_TILES = {"fp32": 2048, "bf16": 4096}
"""Tiles of the summary, for up to 128 k and 256 k tokens."""


def norm(dtype: str, capability: int, size: int, block: int, rows: int, num_warps: int) -> Build:
    pointers = ("x_NGE", "delta_NGE", "weight_GE", "out_RE")
    strides = (
        "x_stride_token",
        "x_stride_group",
        "delta_stride_token",
        "delta_stride_group",
        "weight_stride",
    )
    return Build(
        "engine.kernels.rms_norm:norm_rows",
        dict.fromkeys(pointers, f"*{dtype}")
        | {"eps": "fp32", "num_rows": "i32", "groups": "i32"}
        | dict.fromkeys(strides, "i32"),
        {"SIZE": size, "BLOCK": block, "ROWS": rows, "HAS_DELTA": True, "EARLY": capability >= 90},
        capability,
        pointers + strides,
        num_warps,
        texts=True,
    )


def rotation(dtype: str, capability: int, dim: int, heads: int, has_norm: bool) -> Build:
    strides = ("x_stride_token", "x_stride_head", "rotations_stride")
    return Build(
        "engine.kernels.rotary:rotate_pairs",
        {
            "x_NHD": f"*{dtype}",
            "rotations_ND": "*fp32",
            "weight_HD": f"*{dtype}",
            "eps": "fp32",
            "heads": "i32",
        }
        | dict.fromkeys(strides, "i32"),
        {"DIM": dim, "BLOCK": dim, "HEADS": heads, "HAS_NORM": has_norm},
        capability,
        ("x_NHD", "rotations_ND", "weight_HD", *strides),
        texts=True,
    )


def rotation_into(dtype: str, capability: int, pool: str, has_norm: bool) -> Build:
    """A build for 32 query heads and 8 key heads of size 128."""
    pointers = {"qkv_NAD": dtype, "rotations_ND": "fp32", "weight_HD": dtype, "pool": pool, "scales": "fp32"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"slots": "*i64"}
    signature |= dict.fromkeys(("stride_token", "stride_head", "rotations_stride", "pool_stride_head"), "i32")
    sizes = {"QUERIES": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 128, "HEADS": 8}
    return Build(
        "engine.kernels.rotate_write:rotate_write_heads",
        signature | {"eps": "fp32"},
        {**sizes, "HAS_NORM": has_norm, "HAS_SCALES": pool == "fp8e4nv", "EARLY": capability >= 90},
        capability,
        tuple(signature),
        texts=True,
    )


def silu(dtype: str, capability: int, block: int) -> Build:
    return Build(
        "engine.kernels.silu_mul:silu_mul_rows",
        {"gate_up_N2F": f"*{dtype}", "out_NF": f"*{dtype}", "row_stride": "i32", "size": "i32"},
        {"BLOCK": block, "EARLY": capability >= 90},
        capability,
        ("gate_up_N2F", "out_NF", "row_stride", "size"),
        texts=True,
    )


def survey(dtype: str, capability: int) -> Build:
    return Build(
        "engine.kernels.sampling:survey_tiles",
        {"logits_RV": f"*{dtype}", "row_stride": "i32", "vocab_size": "i32", "num_tiles": "i32"}
        | dict.fromkeys(("peaks_RT", "masses_RT", "temperature_R"), "*fp32"),
        {"LEAST": 1e-5, "TILES": SURVEY_TILES, "TILE": TILE},
        capability,
        ("logits_RV", "row_stride", "vocab_size"),
        texts=True,
    )


def pick(dtype: str, capability: int) -> Build:
    return Build(
        "engine.kernels.sampling:pick_row",
        {"logits_RV": f"*{dtype}", "tiles_RG": "*i32", "top_k_R": "*i32", "out_R": "*i64"}
        | dict.fromkeys(("peaks_RT", "masses_RT", "temperature_R", "top_p_R", "min_p_R"), "*fp32")
        | {"point_R": "*fp64" if dtype == "bf16" else "*fp32"}
        | {"row_stride": "i32", "vocab_size": "i32", "num_tiles": "i32"},
        {
            "LEAST": 1e-5,
            "TILES": VOCAB_TILES[dtype],
            "GROUP": GROUP,
            "TILE": TILE,
            "BLOCK_TILES": BLOCK_TILES,
        },
        capability,
        ("logits_RV", "row_stride", "vocab_size"),
        PICK_WARPS,
    )


def kernels() -> Iterator[Build]:
    for capability, dtype in ((80, "bf16"), (90, "bf16"), (90, "fp32")):
        yield norm(dtype, capability, 4096, 4096, 1, 8)
        yield norm(dtype, capability, 128, 128, 4, 1)
        yield rotation(dtype, capability, 128, 8, False)
        yield rotation(dtype, capability, 64, 16, True)
        yield rotation_into(dtype, capability, dtype, True)
        yield silu(dtype, capability, 2048)
        yield survey(dtype, capability)
        yield pick(dtype, capability)


@pytest.fixture(scope="module")
def reports(compiler: Compiler) -> list[tuple[Build, Report]]:
    builds = list(kernels())
    return list(zip(builds, compiler.build(builds), strict=True))


def test_nothing_spills(reports: list[tuple[Build, Report]]) -> None:
    for one, report in reports:
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.fits(one.capability), one
        assert report.registers * 32 * one.num_warps <= 65536, one


def test_the_number_of_rows_makes_no_new_variant_of_the_pick(compiler: Compiler) -> None:
    """This kernel takes the longest of all to compile, and a table's columns begin wherever its rows end."""
    aligned = compiler.aligned_parameters("engine.kernels.sampling:pick_row")
    assert "logits_RV" in aligned
    assert not aligned & {"temperature_R", "top_k_R", "top_p_R", "min_p_R", "point_R"}


def test_streams_are_read_and_written_16_bytes_at_a_time(reports: list[tuple[Build, Report]]) -> None:
    for one, report in reports:
        if not one.texts:
            continue
        widths = re.findall(r"\b(?:LDG|STG)(?:\.[A-Z]+)*\.E(?:\.[A-Z]\w*)*(\.128|\.64|)", report.sass)
        assert widths, one
        assert widths.count(".128") >= 2, (one.kernel, widths)
        if "silu" in one.kernel or "norm_rows" in one.kernel:
            assert set(widths) == {".128"}, (one.kernel, widths)
