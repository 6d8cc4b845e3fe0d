"""NCCL, where there are GPUs: collectives inside CUDA graphs, and an engine over two cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.parallel.process_ranks import ProcessRanks, join_ranks, make_store
from engine.parallel.ticket import Ticket, Timeouts
from tests.unit.engine.driver import request
from tests.unit.engine.parallel.parallel_rig import ParallelRig, write_model

HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def one_rank_by_nccl() -> ProcessRanks:
    store = make_store(HOST, 30.0)
    ticket = Ticket(0, 1, HOST, 0, store.port, b"", Timeouts(join_s=30.0))
    return join_ranks(ticket, store, torch.device("cuda", torch.cuda.current_device()))


def test_collectives_replay_in_a_graph() -> None:
    ranks = one_rank_by_nccl()
    x_NE = torch.ones(4, 8, dtype=torch.bfloat16, device="cuda")
    picks = torch.arange(4, device="cuda")

    def step() -> torch.Tensor:
        x_NE.mul_(2.0)
        ranks.sum_(x_NE)
        ranks.share_(picks)
        return ranks.join(x_NE)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        joined = step()
    for _ in range(3):
        graph.replay()
    assert joined.tolist() == [[16.0] * 8] * 4
    assert picks.tolist() == [0, 1, 2, 3]
    assert ranks.least(5) == 5
    del graph
    ranks.abort()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    model = replace(
        write_model(tmp_path, head_dim=64, hidden_size=256, num_attention_heads=8),
        device="cuda",
        dtype="float32",
    )
    told = []
    for size in (1, 2):
        rig = ParallelRig(model, size)
        told.append(
            [o.token_ids for o in rig.generate(*(request(f"r{n}", [n, 5, 6], 40) for n in range(1, 5)))]
        )
        rig.stop()
    assert told[0] == told[1]
