"""Graphs by size: on a card they replay, elsewhere they call."""

from __future__ import annotations

import pytest
import torch

from engine.runner.graphs import LADDER, CudaGraphs, NoGraphs, ladder, make_graphs

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
