"""Collectives between CPUs, with two ranks on threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.parallel import process_ranks
from engine.parallel.process_ranks import ProcessRanks, join_ranks, join_store, make_store
from engine.parallel.protocol import Ticket, Timeouts
from engine.parallel.ranks import OneRank, RankGroup

HOST = "127.0.0.1"
CPU = torch.device("cpu")
QUICK = Timeouts(join_s=20.0)


def groups(size: int) -> list[ProcessRanks]:
    store = make_store(HOST, 20.0)
    tickets = [Ticket(rank, size, HOST, 0, store.port, b"", QUICK) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda t: join_ranks(t, join_store(t) if t.rank else store, CPU), tickets))


def on_each(ranks: list[ProcessRanks], work: Callable[[RankGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    parts = [torch.randint(-8, 8, (5, 4)).to(dtype) for _ in range(size)]  # exact sums in any order
    ranks = groups(size)

    def work(group: RankGroup) -> tuple[torch.Tensor, ...]:
        summed, shared = parts[group.rank].clone(), parts[group.rank].clone()
        group.sum_(summed)
        joined = group.join(parts[group.rank][:, 1:])
        group.share_(shared)
        return summed, joined, shared, torch.tensor(group.least(10 - group.rank))

    for summed, joined, shared, least in on_each(ranks, work):
        assert torch.equal(summed, torch.stack(parts).sum(0))
        assert torch.equal(joined, torch.cat([part[:, 1:] for part in parts], 1))
        assert joined.is_contiguous()
        assert torch.equal(shared, parts[0])
        assert least == 10 - (size - 1)


def test_a_wait_for_a_rank_that_does_not_come_is_bounded() -> None:
    first, _second = groups(2)
    first.bound(0.5)
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError):
        first.sum_(torch.ones(3, 3))
    assert time.monotonic() - begun_s < 30.0


class StuckCollectives:
    """Collectives that do not end before they are `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self.released.wait()


def test_collectives_that_do_not_end_hold_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An abort could wait for ever for graphs that contain the collectives, and with it the end of the engine."""
    monkeypatch.setattr(process_ranks, "ABORT_S", 0.05)
    collectives: Any = StuckCollectives()
    ranks = ProcessRanks(collectives, 1, 2, torch.device("cuda", 0))
    ranks.abort()
    ranks.abort()
    assert collectives.aborts == 1
    assert "rank 1 have not ended" in caplog.text
    collectives.released.set()


def test_one_rank_changes_nothing() -> None:
    alone, x = OneRank(), torch.randn(3, 4)
    before = x.clone()
    alone.sum_(x)
    alone.share_(x)
    assert alone.join(x) is x
    assert torch.equal(x, before)
    assert alone.least(7) == 7
