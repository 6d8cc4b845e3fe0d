"""The flash backend against the reference. It runs over a stand-in with the real functions' signatures, or over the
real functions on a card."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_standin import IN_VLLM, STANDALONE, Calls, stand_in
from table_scene import Padding, TableScene

from engine.attention import flash_backend
from engine.attention.flash_backend import FlashAttention, FlashFunction, find_flash, read_function
from engine.attention.interface import AttentionTables, AttentionUnavailable, LayerTraits
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings, KVDType

CPU = torch.device("cpu")
BUILDS = {"in vllm": IN_VLLM, "standalone": STANDALONE}


def function(build: str, calls: Calls | None = None, version: int = 3) -> FlashFunction:
    call = stand_in(BUILDS[build], calls or Calls())
    return read_function(call, build, lambda wanted: wanted == version)


def backend(build: str, calls: Calls | None = None) -> Callable[[KVPool], FlashAttention]:
    return lambda pool: FlashAttention(pool, function(build, calls))


def small_pool(
    dtype: torch.dtype = torch.bfloat16, page_size: int = 16, dim: int = 64, kv_dtype: KVDType = "auto"
) -> KVPool:
    settings = CacheSettings(page_size, 2, kv_dtype=kv_dtype)
    return make_kv_pool(KVLayout(2, dim, (None,)), settings, dtype, CPU)


@pytest.mark.parametrize("kind", ["plain", "cap"])
@pytest.mark.parametrize("most_queries", [1, 40], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("page_size", "padding"),
    [
        (16, Padding()),
        (16, Padding(3, 3)),
        (16, Padding(2, 5)),
        pytest.param(48, Padding(2, 5), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", BUILDS)
def test_equals_the_reference(
    build: str, page_size: int, padding: Padding, most_queries: int, kind: str
) -> None:
    """The pools were NaN before, and window pages that are gone are NaN again. If the backend let the kernels look
    there, the output would be NaN."""
    for seed in range(2):
        scene = TableScene(seed, page_size, most_queries, torch.float16)
        expected = scene.expected(scene.traits(kind))
        got = scene.got(backend(build), scene.traits(kind), padding)
        for one, other in zip(expected.outputs, got.outputs, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-3, rtol=2e-3, msg=f"seed {seed}")
        for mine, textbook in zip(got.pools, expected.pools, strict=True):
            written = textbook.isfinite()
            assert torch.equal(mine[written], textbook[written])
            assert not mine[~written].nan_to_num().any()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels write to a card here")
def test_the_kernel_writes_what_torch_writes() -> None:
    write = pytest.importorskip("engine.attention.kv_writer").write_rows
    scene, padding = TableScene(1, 16, 9, torch.float16), Padding(2, 5)
    one, other = (
        scene.got(
            lambda pool, how=how: FlashAttention(pool, function("in vllm"), write=how),
            scene.traits(""),
            padding,
        )
        for how in (None, write)
    )
    torch.testing.assert_close(other.pools, one.pools, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(other.outputs, one.outputs, atol=0, rtol=0)


def test_sinks() -> None:
    for seed in range(3):
        scene = TableScene(seed, 16, 9, torch.float16)
        expected = scene.expected(scene.traits("sinks"))
        got = scene.got(backend("in vllm"), scene.traits("sinks"))
        for one, other in zip(expected.outputs, got.outputs, strict=True):
            torch.testing.assert_close(other, one, atol=2e-3, rtol=2e-3, msg=f"seed {seed}")


@pytest.mark.parametrize("build", BUILDS)
def test_what_each_build_is_called_with(build: str) -> None:
    calls = Calls()
    scene = TableScene(1, 16, 9, torch.bfloat16)
    scene.got(backend(build, calls), scene.traits("cap"))
    *_, full, narrow = calls.seen
    assert (full["window_size"], narrow["window_size"]) == ((-1, -1), (18, 0))
    assert (full["softmax_scale"], full["softcap"]) == (0.3, 3.0)
    if build == "in vllm":
        assert full["fa_version"] == 3
        assert full["cu_seqlens_k"] is None
        assert full["seqused_k"].tolist() == scene.lengths
    else:
        assert full["cu_seqlens_k"].diff().tolist() == scene.lengths


def test_one_query_an_item_is_said_only_where_rows_are_items() -> None:
    for padding, bound in ((Padding(2, 2), 1), (Padding(2, 5), 2), (Padding(3, 0), 2)):
        calls = Calls()
        scene = TableScene(3, 16, 1, torch.float16)
        scene.got(backend("in vllm", calls), scene.traits("plain"), padding)
        assert calls.seen[-1]["max_seqlen_q"] == bound


def test_a_step_of_padding_alone_writes_nothing() -> None:
    pool = small_pool()
    attention = FlashAttention(pool, function("in vllm"))
    pool.full.kv_LJKSD.fill_(7.0)
    tables = AttentionTables(
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        (torch.full((4, 2), -1, dtype=torch.int32),),
        (torch.full((4,), -1),),
        1,
        32,
    )
    q_NHD, kv_NJKD = torch.ones(4, 4, 64).bfloat16(), torch.ones(4, 2, 2, 64).bfloat16()
    assert attention.plan(tables)(0, q_NHD, kv_NJKD, LayerTraits(1.0)).shape == (4, 256)
    assert (pool.full.kv_LJKSD == 7.0).all()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (small_pool(torch.float32), "takes float16 and bfloat16, the KV is torch.float32"),
        (small_pool(kv_dtype="fp8"), "the KV is torch.float8_e4m3fn"),
        (small_pool(page_size=24), "page_size must be a multiple of 16, it is 24"),
        (small_pool(dim=264), "up to 256 numbers, they have 264"),
        (small_pool(dim=60), "multiples of 8"),
    ],
)
def test_pools_that_it_cannot_read_are_refused(pool: KVPool, message: str) -> None:
    with pytest.raises(AttentionUnavailable, match=message):
        FlashAttention(pool, function("in vllm"))


def test_sinks_are_refused_where_the_function_has_none() -> None:
    for flash in (function("standalone"), function("in vllm", version=2)):
        with pytest.raises(AttentionUnavailable, match="only version 3 takes"):
            FlashAttention(small_pool(), flash, sinks=2)
    FlashAttention(small_pool(), function("in vllm"), sinks=64)
    with pytest.raises(AttentionUnavailable, match="up to 64 heads, not 65"):
        FlashAttention(small_pool(), function("in vllm"), sinks=65)


@pytest.mark.parametrize("missing", ["block_table", "softcap", "window_size"])
def test_functions_that_take_too_little_are_refused(missing: str) -> None:
    def less(**_: Any) -> None: ...

    parameters = list(inspect.signature(stand_in(STANDALONE, Calls())).parameters.values())
    less.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each for each in parameters if each.name != missing]
    )
    with pytest.raises(AttentionUnavailable, match=f"old does not take {missing}"):
        read_function(less, "old")


def test_a_gpu_that_no_version_serves_is_refused() -> None:
    with pytest.raises(AttentionUnavailable, match="no version for this GPU"):
        read_function(stand_in(IN_VLLM, Calls()), "in vllm", lambda _: False)


def test_the_first_build_that_imports_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    standalone = ModuleType("vllm_flash_attn")
    standalone.flash_attn_varlen_func = stand_in(STANDALONE, Calls())  # type: ignore[attr-defined]
    modules: dict[str, ModuleType] = {"vllm_flash_attn": standalone}

    def import_module(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    monkeypatch.setattr(flash_backend.importlib, "import_module", import_module)
    assert (find_flash().source, find_flash().version) == ("vllm_flash_attn", None)
    in_vllm = ModuleType("vllm.vllm_flash_attn")
    in_vllm.flash_attn_varlen_func = stand_in(IN_VLLM, Calls())  # type: ignore[attr-defined]
    in_vllm.is_fa_version_supported = lambda version: version == 2  # type: ignore[attr-defined]
    modules["vllm.vllm_flash_attn"] = in_vllm
    assert (find_flash().source, find_flash().version) == ("vllm.vllm_flash_attn", 2)
    modules.clear()
    with pytest.raises(AttentionUnavailable, match="No module named 'vllm_flash_attn'"):
        find_flash()


@pytest.fixture(scope="module")
def real() -> FlashFunction:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        return find_flash()
    except AttentionUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks"])
@pytest.mark.parametrize("most_queries", [1, 40], ids=["decode", "mixed"])
def test_the_real_function_equals_the_reference(real: FlashFunction, most_queries: int, kind: str) -> None:
    if kind == "sinks" and not real.takes_sinks:
        pytest.skip(f"{real.source} has no sinks")
    write = pytest.importorskip("engine.attention.kv_writer").write_rows
    for seed in range(4):
        for padding in (Padding(), Padding(2, 2), Padding(1, 4)):
            scene = TableScene(seed, 16, most_queries, torch.bfloat16, torch.device("cuda"))
            expected = scene.expected(scene.traits(kind))
            got = scene.got(lambda pool: FlashAttention(pool, real, write=write), scene.traits(kind), padding)
            for one, other in zip(expected.outputs, got.outputs, strict=True):
                torch.testing.assert_close(other, one, atol=2e-2, rtol=2e-2, msg=f"seed {seed}")
