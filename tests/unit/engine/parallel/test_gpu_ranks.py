"""NCCL on GPUs: collectives inside CUDA graphs, and an engine over two cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.parallel.process_ranks import ProcessRanks, join_ranks, make_store
from engine.parallel.protocol import Ticket, Timeouts
from engine.runner.graphs import WARM_UPS, CudaGraphs
from tests.unit.engine.driver import request
from tests.unit.engine.parallel.parallel_rig import ParallelRig, write_model

HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def one_rank_by_nccl() -> ProcessRanks:
    store = make_store(HOST, 30.0)
    ticket = Ticket(0, 1, HOST, 0, store.port, b"", Timeouts(join_s=30.0))
    return join_ranks(ticket, store, torch.device("cuda", torch.cuda.current_device()))


def test_collectives_replay_in_a_graph() -> None:
    """The collectives are captured like a runner's steps, while NCCL's own threads use the device."""
    ranks = one_rank_by_nccl()
    device = torch.device("cuda", torch.cuda.current_device())
    x_NE = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
    joined_NE, picks = torch.zeros_like(x_NE), torch.arange(4, device=device)

    def step() -> None:
        x_NE.mul_(2.0)
        ranks.sum_(x_NE)
        ranks.share_(picks)
        joined_NE.copy_(ranks.join(x_NE))

    graphs = CudaGraphs(device)
    graphs.capture("step", step)
    for _ in range(3):
        graphs.run("step", step)
    assert joined_NE.tolist() == [[2.0 ** (WARM_UPS + 3)] * 8] * 4
    assert picks.tolist() == [0, 1, 2, 3]
    assert ranks.least(5) == 5
    del graphs
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
