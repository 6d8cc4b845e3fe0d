"""Which attention backend is chosen, and what is reported about the choice."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from engine.attention import choose, flash_backend
from engine.attention.choose import choose_attention
from engine.attention.cpu_backend import CpuAttention
from engine.attention.flash_backend import FlashFunction
from engine.attention.interface import AttentionUnavailable, Queries
from engine.attention.table_torch import TorchTables
from engine.attention.tables import ItemAttention
from engine.attention.torch_backend import TorchAttention
from engine.cpu.library import NoKernels
from engine.kernels import trial
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings, KVDType
from tests.unit.engine.cpu.builds import every_build, kernels_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
QUERIES = Queries(4, torch.float32)


def pool(dtype: torch.dtype = torch.bfloat16, page_size: int = 16, kv_dtype: KVDType = "auto") -> KVPool:
    """A pool in host memory, because these tests only choose a backend."""
    settings = CacheSettings(page_size, 2, kv_dtype=kv_dtype)
    return make_kv_pool(KVLayout(2, 64, (None,)), settings, dtype, CPU)


class AnyTriton:
    name = "triton"

    def __init__(self, pool: KVPool, prompts: object = None, *, deterministic: bool = False) -> None:
        self.pool = pool
        self.prompts = prompts
        self.deterministic = deterministic


def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ModuleType("engine.attention.triton_backend")
    backend.TritonAttention = AnyTriton  # type: ignore[attr-defined]
    trial_of_prompts = ModuleType("engine.attention.prompt_trial")
    trial_of_prompts.try_prompts = lambda _pool, _sinks: ("a library", "prompts by a library")  # type: ignore[attr-defined]
    trial_of_bits = ModuleType("engine.attention.bits_trial")
    monkeypatch.setattr(trial_of_bits, "check_bits", lambda _pool, _queries: None, raising=False)
    for module in (backend, trial_of_prompts, trial_of_bits):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(trial, "write_one", lambda _device: None)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.kernels.trial", None)


def with_flash(monkeypatch: pytest.MonkeyPatch, version: int | None = 3) -> None:
    takes = frozenset({"seqused_k", "s_aux", "fa_version"})
    function = FlashFunction(lambda: None, "a stand-in", version, takes)
    monkeypatch.setattr(flash_backend, "find_flash", lambda: function)


def without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in flash_backend.MODULES:
        monkeypatch.setitem(sys.modules, source, None)


@every_build
def test_a_cpu_has_the_compiled_kernels(variant: str) -> None:
    kernels_of(variant)
    for name in ("auto", "cpu"):
        choice = choose_attention(name, pool(torch.float32), CPU)  # type: ignore[arg-type]
        assert choice.name == "cpu"
        assert isinstance(choice.items, CpuAttention)
    with pytest.raises(AttentionUnavailable, match="on a GPU"):
        choose_attention("cpu", pool(torch.float32), GPU)
    other = choose_attention("auto", pool(torch.bfloat16), CPU)
    assert (other.name, "not cpu: " in other.reason) == ("torch", True)


def test_deterministic_attention_is_that_of_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttentionUnavailable, match=r"'torch' cannot run: .*execution\.deterministic"):
        choose_attention("torch", pool(torch.float32), CPU, deterministic=QUERIES)
    with pytest.raises(AttentionUnavailable, match=r"execution\.deterministic"):
        choose_attention("auto", pool(), GPU, deterministic=QUERIES)
    monkeypatch.setattr(choose, "find_kernels", lambda: NoKernels("there was no compiler"))
    with pytest.raises(AttentionUnavailable, match="there was no compiler"):
        choose_attention("auto", pool(torch.float32), CPU, deterministic=QUERIES)


def test_deterministic_attention_of_triton_has_splits_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choice = choose_attention("triton", pool(torch.float32), CPU, deterministic=QUERIES)
    assert isinstance(choice.tables, AnyTriton)
    assert (choice.tables.deterministic, choice.tables.prompts) == (True, None)
    assert "splits of one length" in choice.reason

    def differ(_pool: KVPool, _queries: Queries) -> None:
        raise AttentionUnavailable("triton", "a query has other bits")

    monkeypatch.setattr(sys.modules["engine.attention.bits_trial"], "check_bits", differ)
    with pytest.raises(AttentionUnavailable, match="a query has other bits"):
        choose_attention("triton", pool(torch.float32), CPU, deterministic=QUERIES)


def test_without_them_it_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_kernels", lambda: NoKernels("there was no compiler"))
    assert choose_attention("auto", pool(torch.float32), CPU).reason.endswith(
        "not cpu: there was no compiler"
    )
    for name in ("auto", "torch"):
        choice = choose_attention(name, pool(torch.float32), CPU)  # type: ignore[arg-type]
        assert choice.name == "torch"
        assert isinstance(choice.items, TorchAttention)
        assert isinstance(choice.tables, TorchTables)
    assert "asked for" in choice.reason


def test_a_gpu_takes_triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch)
    with_flash(monkeypatch)
    choice = choose_attention("auto", pool(), GPU)
    assert isinstance(choice.tables, AnyTriton)
    assert isinstance(choice.items, ItemAttention)
    assert choice.tables.prompts == "a library"
    assert choice.reason == "the first that can run here; prompts by a library"
    asked = choose_attention("triton", pool(), GPU)
    assert isinstance(asked.tables, AnyTriton)
    assert asked.tables.prompts is None, "what is asked for is Kedge's own kernels"
    assert asked.reason == "it was asked for"


def test_then_flash_then_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    with_flash(monkeypatch)
    choice = choose_attention("auto", pool(), GPU)
    assert choice.name == choice.tables.name == "flash"
    assert "not triton: " in choice.reason
    odd = choose_attention("auto", pool(page_size=4), GPU)
    assert odd.name == "torch"
    assert "not flash: page_size must be a multiple of 16, it is 4" in odd.reason


def test_without_any_kernels_a_gpu_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    without_flash(monkeypatch)
    choice = choose_attention("auto", pool(), GPU)
    assert choice.name == "torch"
    assert "vllm.vllm_flash_attn" in choice.reason
    assert "vllm_flash_attn" in choice.reason


def test_what_is_asked_for_by_name_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_flash(monkeypatch)
    with pytest.raises(AttentionUnavailable, match=r"attention 'flash' cannot run: vllm\.vllm_flash_attn: "):
        choose_attention("flash", pool(), GPU)
    with pytest.raises(AttentionUnavailable, match="attention 'flash' cannot run: it needs a GPU"):
        choose_attention("flash", pool(), CPU)
    without_triton(monkeypatch)
    with pytest.raises(AttentionUnavailable, match=r"engine\.kernels\.trial is not installed"):
        choose_attention("triton", pool(), GPU)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_attention("triton", pool(), CPU).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(AttentionUnavailable, match="TRITON_INTERPRET=1"):
        choose_attention("triton", pool(), CPU)


def test_fp8_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch)
    with_flash(monkeypatch)
    assert choose_attention("auto", pool(kv_dtype="fp8"), GPU).name == "triton"
    for name in ("flash", "torch"):
        with pytest.raises(AttentionUnavailable, match=f"attention '{name}' cannot run: .*(fp8|float8)"):
            choose_attention(name, pool(kv_dtype="fp8"), GPU)  # type: ignore[arg-type]
    without_triton(monkeypatch)
    with pytest.raises(
        AttentionUnavailable, match=r"'auto' cannot run: not triton: .*not flash: .*not torch: "
    ):
        choose_attention("auto", pool(kv_dtype="fp8"), GPU)


def test_sinks_need_version_3(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    with_flash(monkeypatch, version=2)
    choice = choose_attention("auto", pool(), GPU, sinks=4)
    assert choice.name == "torch"
    assert "only version 3 takes" in choice.reason
    with_flash(monkeypatch, version=3)
    assert choose_attention("auto", pool(), GPU, sinks=4).name == "flash"
