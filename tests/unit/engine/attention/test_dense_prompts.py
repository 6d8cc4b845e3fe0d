"""Prompts that are left to a library's kernels, over copies of their keys. On a card with FlashAttention 3 the real
kernels run, else a stand-in with their signature."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from engine.attention import dense_prompts, prompt_trial
from engine.attention.dense_prompts import DensePrompts, FlashPrompts, Run, find_flash_prompts
from engine.attention.interface import AttentionUnavailable, ItemLens
from engine.attention.prompt_trial import try_prompts
from engine.attention.tiles import AttentionTiles, TileShape
from engine.attention.triton_backend import TritonAttention
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.stage import DEVICE, Shape, Stage, make_stage
from tests.unit.engine.attention.varlen_standin import flash_attn_varlen_func

STAND_IN = FlashPrompts(flash_attn_varlen_func, "a stand-in")
TILES = AttentionTiles((TileShape(16, 16, 4, 2, 4), TileShape(32, 16, 4, 2, 2)), min_split=16)
TOLERANCE = 2e-2
ITEMS = ((1, 30), (40, 40), (17, 60), (1, 5), (1, 1), (33, 34), (2, 9))
"""Decodes, prompts with and without a history, and a turn of two tokens that is treated like a decode."""


def library() -> FlashPrompts:
    """The real kernels where there are any. They have no heads of 16 numbers."""
    try:
        return find_flash_prompts() if DEVICE.type == "cuda" else STAND_IN
    except AttentionUnavailable:
        return STAND_IN


def shape_of(**changes: object) -> Shape:
    shape = Shape(ITEMS, page_size=4, kv_heads=1, group=4, dim=64, scale=0.125, dtype=torch.bfloat16)
    return replace(shape, **changes)  # type: ignore[arg-type]


def got(stage: Stage, prompts: DensePrompts) -> list[torch.Tensor]:
    lens = tuple(ItemLens(item.query_len, item.kv_len) for item in stage.items)
    tables = replace(stage.tables(), lens=lens)
    return stage.got(TritonAttention(stage.pool, TILES, 16, prompts), tables)


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(kv_heads=2),
        shape_of(items=((40, 40), (17, 60))),
        shape_of(items=((90, 90),)),
        shape_of(fp8=True),
        shape_of(softcap=2.0),
        shape_of(kv_heads=2, group=1, page_size=16),
        shape_of(group=20, items=((1, 30), (3, 30))),
        shape_of(window=19),
    ],
    ids=["mixed", "alike", "one", "fp8", "cap", "heads", "large group", "window"],
)
@pytest.mark.parametrize("workspace", [100, 1000])
def test_equals_the_reference(shape: Shape, workspace: int) -> None:
    """A step of few and of many runs. The workspace was NaN."""
    want = make_stage(shape, 3).expected()
    stage = make_stage(shape, 3)
    calls = []
    flash = library()

    def counted(**arguments: object) -> object:
        calls.append(arguments)
        return flash.call(**arguments)

    prompts = DensePrompts(stage.pool, FlashPrompts(counted, ""), workspace, least_rows=0)
    prompts._dense_2KTD.fill_(torch.nan)
    for one, other in zip(got(stage, prompts), want, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)
    assert calls, "the library was not called"


def test_a_step_that_may_be_captured_is_ours_alone() -> None:
    """Its lengths are not known to the host."""
    stage = make_stage(shape_of(), 3)
    prompts = DensePrompts(stage.pool, FlashPrompts(_never, ""), least_rows=0)
    assert stage.tables().lens is None
    assert all(out.isfinite().all() for out in stage.got(TritonAttention(stage.pool, TILES, 16, prompts)))


def _never(**_: object) -> None:
    raise AssertionError("called")


def lens(*pairs: tuple[int, int]) -> list[ItemLens]:
    return [ItemLens(*pair) for pair in pairs]


def prompts_of(workspace: int, least_rows: int) -> DensePrompts:
    stage = make_stage(shape_of(items=((1, 2),)), 0)
    return DensePrompts(stage.pool, STAND_IN, workspace, least_rows)


def test_runs_are_neighbours_that_fit_into_the_workspace() -> None:
    prompts = prompts_of(100, 0)
    items = lens((1, 50), (20, 60), (5, 40), (30, 30), (1, 9), (9, 9))
    assert prompts.runs(items, 4, 16) == [
        Run(1, 3, 1, 26, 20, 60, 100),
        Run(3, 4, 26, 56, 30, 30, 30),
        Run(5, 6, 57, 66, 9, 9, 9),
    ]


def test_there_are_none_where_a_copy_would_not_pay() -> None:
    prompts = prompts_of(1000, 100)
    assert not prompts.runs(lens((24, 900), (1, 900)), 4, 16), "96 rows for each key"
    assert prompts.runs(lens((25, 900), (1, 900)), 4, 16), "100 rows for each key"
    assert not prompts.runs(lens((25, 900), (5, 900)), 4, 16), "60 rows in the mean"
    assert not prompts.runs(lens((400, 1001)), 4, 16), "longer than the workspace"
    assert not prompts.runs(lens((1, 900), (4, 900)), 4, 16), "decodes alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pools_it_cannot_multiply_are_refused(dtype: torch.dtype) -> None:
    stage = make_stage(shape_of(items=((1, 2),), dtype=dtype), 0)
    with pytest.raises(AttentionUnavailable, match=f"it multiplies bfloat16, the KV is {dtype}"):
        DensePrompts(stage.pool, STAND_IN)


def module(function: object) -> ModuleType:
    made = ModuleType("fa3_fwd_interface")
    made.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    return made


def test_the_function_is_found_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, ModuleType] = {}

    def find(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(f"no {name}")
        return modules[name]

    monkeypatch.setattr(dense_prompts.importlib, "import_module", find)
    with pytest.raises(AttentionUnavailable, match=r"no flash_attn_interface; .*no fa3_fwd_interface"):
        find_flash_prompts()
    modules["fa3_fwd_interface"] = module(flash_attn_varlen_func)
    assert find_flash_prompts() == FlashPrompts(flash_attn_varlen_func, "fa3_fwd_interface")
    modules["fa3_fwd_interface"] = module(lambda: None)
    with pytest.raises(AttentionUnavailable, match="does not take causal, cu_seqlens_k, cu_seqlens_q"):
        find_flash_prompts()


def trial_pool() -> KVPool:
    return make_kv_pool(KVLayout(2, 64, (None,)), CacheSettings(16, 2), torch.bfloat16, DEVICE)


@pytest.mark.parametrize(("seconds", "taken"), [((1.0, 0.5), True), ((1.0, 0.95), False)])
def test_the_quicker_is_taken(
    seconds: tuple[float, float], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_trial, "find_flash_prompts", lambda: STAND_IN)
    found, reason = try_prompts(trial_pool(), timer=lambda _: list(seconds), tokens=48)
    assert (found is not None) == taken
    assert f"{seconds[1]:.2f} of the time" in reason


def test_wrong_results_and_failures_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**arguments: object) -> object:
        return 1.1 * flash_attn_varlen_func(**arguments)  # type: ignore[arg-type]

    def broken(**_: object) -> object:
        raise RuntimeError("no kernel image")

    for call, reason in ((wrong, "other results"), (broken, "RuntimeError: no kernel image")):
        monkeypatch.setattr(prompt_trial, "find_flash_prompts", lambda call=call: FlashPrompts(call, "x"))
        found, why = try_prompts(trial_pool(), timer=lambda _: [1.0, 0.1], tokens=48)
        assert found is None
        assert reason in why


def test_a_card_that_would_end_the_process_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(**_: object) -> object:
        raise SystemExit(1)

    monkeypatch.setattr(prompt_trial, "find_flash_prompts", lambda: FlashPrompts(ends, "x"))
    for capability, told in ((100, "10.0"), (120, "12.0")):
        monkeypatch.setattr(prompt_trial, "compute_capability", lambda _device, found=capability: found)
        found, why = try_prompts(trial_pool(), timer=lambda _: [1.0, 0.1], tokens=48)
        assert found is None
        assert f"compute capability {told}" in why


def test_layers_that_no_library_takes_hold_no_workspace() -> None:
    windowed = make_kv_pool(KVLayout(2, 64, (16,)), CacheSettings(16, 2), torch.bfloat16, DEVICE)
    for pool, sinks, trait in ((windowed, 0, "a window"), (trial_pool(), 4, "attention sinks")):
        found, why = try_prompts(pool, sinks, tokens=48)
        assert found is None
        assert trait in why
