"""A launch never asks the device for a value and never waits for a copy. Torch's meta device, which has no values,
shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cache.tiers import PoolPages
from engine.api import SamplingParams
from engine.attention.interface import AttentionStep, AttentionTables, LayerTraits
from engine.batch import PENDING, BatchItem, SampleSpec, ScheduledBatch, SeenTokens
from engine.models.config import parse_spec
from engine.models.decoder import Decoder
from engine.models.linear import PlainLinear
from engine.models.ops import TorchOps
from engine.models.tensor_shapes import tensor_shapes
from engine.parallel.ranks import OneRank
from engine.runner import device_runner as device_runner_module
from engine.runner import host_copies as host_copies_module
from engine.runner import page_tables as page_tables_module
from engine.runner import penalties as penalties_module
from engine.runner import sampler as sampler_module
from engine.runner.device_runner import DeviceRunner
from engine.runner.graphs import NoGraphs
from engine.runner.host_copies import HostCopies
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.runner.protocol import RunnerFacts
from engine.runner.sample_table import SampleTable, pick_by_row
from engine.runner.step_buffers import StepBuffers
from engine.settings import CacheSettings

PAGE_SIZE = 4
MOST_STEPS = 4
SIZES = (1, 2, 4, 8)
DEVICE = torch.device("meta")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GREEDY = SamplingParams(temperature=0.0)
BIASED = SamplingParams(temperature=0.0, logit_bias={5: 2.0})
PENAL = SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5)
SAMPLED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3)

COPY = torch.ops.aten.copy_.default


class NoWaiting(TorchDispatchMode):
    """Allows only non-blocking copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = [arg.is_meta for arg in args if isinstance(arg, Tensor)]
        if any(there) and not all(there):
            assert func is COPY, f"{func} mixes host and device"
            target, source, *non_blocking = args
            assert non_blocking == [True], "a copy that the host waits for"
            assert target.is_contiguous(), "a copy by way of a copy"
            assert source.is_contiguous(), "a copy by way of a copy"
            self.to_device += target.is_meta
            self.to_host += source.is_meta
            return target
        made = func(*args, **(kwargs or {}))
        assert not isinstance(made, Tensor) or made.is_meta or not any(there), f"{func} leaves the device"
        assert not isinstance(made, Tensor) or not made.is_meta or all(there), f"{func} goes to the device"
        return made


class Zeros:
    """A WeightSource whose tensors are all zeros."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def take(self, name: str) -> Tensor:
        return torch.zeros(self._shapes[name], device=DEVICE)


class StubAttention:
    """A TableAttention that reads its tables on the device."""

    def captures(self, max_query_len: int) -> bool:  # noqa: ARG002
        return True

    def plan(self, tables: AttentionTables) -> AttentionStep:
        def step(layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
            del layer, kv_NJKD, traits
            rows = len(q_NHD)
            assert [len(slots_N) for slots_N in tables.slots_PN] == [rows]
            return q_NHD.reshape(rows, -1) + tables.kv_lens_B.sum() + tables.query_starts_B1[-1]

        return step


class Plain:
    """What the device's runner needs of the plain runner."""

    facts = RunnerFacts(64, PAGE_SIZE, 1, 50, 128)

    def with_drafts(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch


class NoFence:
    def __init__(self, device: torch.device) -> None: ...

    def wait(self, timeout_s: float) -> None: ...


def pick_likeliest(logits_RV: Tensor, table: SampleTable, out_R: Tensor) -> None:
    assert len(table.point_R) == len(out_R)
    out_R.copy_(logits_RV.argmax(-1))


def refuse(*_args: object, **_options: object) -> None:
    raise AssertionError("a tensor of numbers on the host")


def sent(numbers: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(len(numbers), dtype=dtype, device=device)


@pytest.fixture
def make_runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceRunner]:
    monkeypatch.setattr(device_runner_module, "Fence", NoFence)
    monkeypatch.setattr(sampler_module, "send", sent)
    monkeypatch.setattr(penalties_module, "send", sent)
    monkeypatch.setattr(page_tables_module, "send", sent)

    def make(picker: Any = pick_likeliest) -> DeviceRunner:
        spec = parse_spec(CONFIG)
        source = Zeros(tensor_shapes(spec))
        model = Decoder(spec, source, PlainLinear, DEVICE, torch.float32, TorchOps(), OneRank())
        buffers = StepBuffers(16, 8, 12, 20, 1, MOST_STEPS, PAGE_SIZE, DEVICE)
        runner = DeviceRunner(
            Plain(), model, StubAttention(), buffers, picker, NoGraphs(), SIZES, 12, MOST_STEPS,  # type: ignore[arg-type]
            OneRank(), runs_ahead=True,
        )  # fmt: skip
        for name in ("tensor", "as_tensor"):  # on a device these wait, and the mode does not see it
            monkeypatch.setattr(torch, name, refuse)
        with NoWaiting():
            runner.launch(ScheduledBatch(FIRST))
        return runner

    return make


def item(
    index: int, tokens: list[int], start: int, params: SamplingParams | None, **options: Any
) -> BatchItem:
    pages = np.arange(index * 10, (index + 1) * 10, dtype=np.int32)
    spec = None
    if params is not None:
        seen = SeenTokens(np.array([1, 2]), [3, 3]) if params is PENAL else None
        logprobs = options.pop("logprobs", False)
        spec = SampleSpec(params, seen, logprobs, 2 * logprobs)
    return BatchItem(str(index), tokens, start, pages, True, spec, **options)


FIRST = [item(0, [1, 2, 3], 0, GREEDY), item(1, [4], 0, SAMPLED), item(2, [5, 6], 0, None, next_token=7)]
"""The batch that is launched before each of the cases."""

CASES = {
    "decode": ScheduledBatch([item(0, [9], 3, GREEDY), item(1, [9], 1, GREEDY)]),
    "pending": ScheduledBatch([item(0, [PENDING], 3, GREEDY, pending_from=0), item(1, [8], 1, SAMPLED)]),
    "mixed": ScheduledBatch(
        [item(1, [PENDING], 1, SAMPLED, pending_from=1), item(3, [1, 2, 3, 4], 0, SAMPLED)]
    ),
    "chunks alone": ScheduledBatch([item(3, [1, 2, 3], 0, None, next_token=4)]),
    "drafts": ScheduledBatch([item(0, [9, 1, 2], 3, SAMPLED, num_drafts=2), item(1, [9], 1, GREEDY)]),
    "beyond the ladder": ScheduledBatch([item(3, [1] * 9, 0, GREEDY), item(1, [9], 1, GREEDY)]),
    "several steps": ScheduledBatch(
        [item(0, [PENDING], 3, GREEDY, pending_from=0), item(1, [PENDING], 1, SAMPLED, pending_from=1)],
        MOST_STEPS,
    ),
    "edited": ScheduledBatch([item(0, [9], 3, PENAL), item(1, [PENDING], 1, BIASED, pending_from=1)]),
    "scored": ScheduledBatch([item(0, [9], 3, GREEDY, logprobs=True)]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_launch_waits_for_nothing(make_runner: Callable[..., DeviceRunner], case: str) -> None:
    runner, batch = make_runner(), CASES[case]
    with NoWaiting() as mode:
        runner.launch(batch)
    assert (mode.to_device, mode.to_host) == (2, batch.num_steps), (
        "integers and floats; the rest is sent as it comes up"
    )


def test_a_clone_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the host would wait, for a fork, for the step that is under way."""
    monkeypatch.setattr(host_copies_module, "send", sent)
    pool = make_kv_pool(KVLayout(2, 8, (None, 4)), CacheSettings(PAGE_SIZE, 6), torch.bfloat16, DEVICE)
    copies = HostCopies(pool)
    source, target = (PoolPages(np.array([n], np.int32), np.array([n], np.int32)) for n in (0, 1))
    with NoWaiting():
        copies.clone(source, target)
    copies.close()


WAITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "counts": lambda logits_RV, out_R: out_R[logits_RV[:, 0] > 0],
    "brings its own": lambda logits_RV, out_R: out_R.copy_(torch.ones(len(logits_RV))),
    "takes away": lambda logits_RV, out_R: torch.ones(len(logits_RV)).copy_(out_R),
    "makes on the host": lambda logits_RV, out_R: out_R.fill_(torch.tensor(len(logits_RV), device=DEVICE)),
}


def test_a_picker_that_reads_values_is_found_out(make_runner: Callable[..., DeviceRunner]) -> None:
    with pytest.raises(NotImplementedError, match="no data"):
        make_runner(pick_by_row)


@pytest.mark.parametrize("how", list(WAITS))
def test_whoever_waits_is_found_out(make_runner: Callable[..., DeviceRunner], how: str) -> None:
    with pytest.raises((NotImplementedError, AssertionError)):
        make_runner(lambda logits_RV, _table, out_R: WAITS[how](logits_RV, out_R))
