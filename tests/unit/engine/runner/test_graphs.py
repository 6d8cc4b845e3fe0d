"""Graphs by size: on a card they are replayed, elsewhere their functions are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.runner import graphs as graphs_module
from engine.runner.graphs import LADDER, WARM_UPS, CudaGraphs, NoGraphs, ladder, make_graphs

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_the_ladder_ends_with_what_was_asked_for() -> None:
    assert ladder(1) == (1,)
    assert ladder(20) == (1, 2, 4, 8, 12, 16, 20)
    assert ladder(64) == LADDER[: LADDER.index(64) + 1]
    assert ladder(10_000)[-1] == 10_000


def test_without_a_gpu_functions_are_called() -> None:
    graphs, calls = make_graphs(CPU, wanted=True), []
    assert isinstance(graphs, NoGraphs)
    assert not graphs.replays
    graphs.capture("key", lambda: calls.append("capture"))
    graphs.run("key", lambda: calls.append("run"))
    assert calls == ["run"]


class StandInCuda:
    """The part of torch.cuda that a capture uses. `met` has the stream of each run of the captured function and of each
    capture."""

    def __init__(self) -> None:
        self.current: Any = SimpleNamespace(name="default", wait_stream=lambda _: None)
        self.met: list[str] = []
        self.streams = 0

    def Stream(self, _device: torch.device) -> Any:  # noqa: N802 - torch's name
        self.streams += 1
        return SimpleNamespace(name=f"side {self.streams}", wait_stream=lambda _: None)

    def current_stream(self, _device: torch.device) -> Any:
        return self.current

    def graph_pool_handle(self) -> object:
        return object()

    def synchronize(self, _device: torch.device) -> None: ...

    def CUDAGraph(self) -> object:  # noqa: N802
        return object()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, _graph: object, stream: Any = None, **_options: Any) -> Iterator[None]:
        with self.stream(stream or self.Stream(CPU)):
            yield


def test_all_captures_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps tens of megabytes for each stream that it has met, and no account includes them."""
    cuda = StandInCuda()
    monkeypatch.setattr(graphs_module, "torch", SimpleNamespace(cuda=cuda))
    graphs = CudaGraphs(CPU)
    for size in range(3):
        graphs.capture(size, lambda: cuda.met.append(cuda.current.name))
    assert set(cuda.met) == {"side 1"}
    assert len(cuda.met) == 3 * (WARM_UPS + 1)
    assert cuda.current.name == "default"
    graphs.close()
    graphs.run(0, lambda: cuda.met.append("called"))
    assert cuda.met[-1] == "called"


@needs_gpu
def test_a_replay_does_what_was_captured_with_what_lies_there_now() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    calls = []

    def double() -> None:
        calls.append(None)
        y.copy_(x * 2)

    graphs = CudaGraphs(device)
    graphs.capture("double", double)
    before = len(calls)
    x.fill_(3.0)
    graphs.run("double", double)
    assert y.tolist() == [6.0] * 4
    assert len(calls) == before
    graphs.run("never captured", double)
    assert len(calls) == before + 1
