"""A RankGroup of processes: torch's collectives, NCCL between GPUs and gloo between CPUs.

The backends are used as separate objects, not through torch.distributed's process-wide default group. So an engine
leaves nothing behind, and two can share a process.

Legend: N tokens, E hidden size, R rows, v one rank's share of the vocabulary.
"""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOp

from engine.parallel.protocol import Ticket

_logger = logging.getLogger(__name__)

ABORT_S = 5.0
"""How long the end of collectives may take. NCCL may wait for a graph that is just replayed, or for a driver."""


class Collectives(Protocol):
    """The methods used of torch's backends."""

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Any: ...

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Any: ...

    def _allgather_base(self, output: Tensor, x: Tensor, options: AllgatherOptions, /) -> Any: ...

    def set_timeout(self, timeout: timedelta, /) -> None: ...

    def abort(self) -> None: ...


class ProcessRanks:
    """RankGroup. With NCCL every method but `least` only queues work on the current stream. The host does not wait, so
    CUDA graphs can contain it. With gloo each method waits, at most for the timeout; it raises RuntimeError after that,
    or as soon as another process is gone."""

    def __init__(self, collectives: Collectives, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._collectives = collectives
        self._device = device
        self._aborted = threading.Lock()  # taken by the first abort
        self._sum = AllreduceOptions()
        self._least = AllreduceOptions()
        self._least.reduceOp = ReduceOp.MIN  # type: ignore[assignment]
        self._join = AllgatherOptions()
        self._share = BroadcastOptions()
        self._share.rootRank = 0
        for options in (self._sum, self._least, self._join, self._share):
            options.asyncOp = False  # on the current stream, not on one of the backend's own

    def sum_(self, x_NE: Tensor) -> None:
        _finish(self._collectives.allreduce([x_NE], self._sum))

    def join(self, x_Rv: Tensor) -> Tensor:
        rows, share = x_Rv.shape
        below = x_Rv.new_empty((self.size * rows, share))
        _finish(self._collectives._allgather_base(below, x_Rv.contiguous(), self._join))
        return below.view(self.size, rows, share).transpose(0, 1).reshape(rows, self.size * share)

    def share_(self, x: Tensor) -> None:
        _finish(self._collectives.broadcast([x], self._share))

    def least(self, value: int) -> int:
        holder = torch.tensor([value], dtype=torch.int64, device=self._device)
        _finish(self._collectives.allreduce([holder], self._least))
        return int(holder.item())

    def bound(self, timeout_s: float) -> None:
        """From now on a wait for another rank takes no longer than `timeout_s`."""
        self._collectives.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Ends collectives that wait for a rank that will not come (gloo's end by themselves). Any thread. The first
        call waits for that, no longer than ABORT_S."""
        if self._device.type != "cuda" or not self._aborted.acquire(blocking=False):
            return
        end = threading.Thread(target=self._collectives.abort, name="kedge-abort-ranks", daemon=True)
        end.start()
        end.join(ABORT_S)
        if end.is_alive():
            _logger.error("the collectives of rank %d have not ended within %.0f s", self.rank, ABORT_S)


def _finish(work: Any) -> None:
    """Some backends return nothing to wait for when work is queued on the current stream."""
    if work is not None:
        work.wait()


def make_store(host: str, timeout_s: float) -> TCPStore:
    """Rank 0's store, on a free port that it chooses (`.port`)."""
    return TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(ticket: Ticket) -> TCPStore:
    timeout = timedelta(seconds=ticket.timeouts.join_s)
    return TCPStore(ticket.host, ticket.store_port, None, False, timeout, wait_for_workers=False)


def join_ranks(ticket: Ticket, store: Store, device: torch.device) -> ProcessRanks:
    """Waits for the other ranks. NCCL between GPUs, gloo between CPUs."""
    rank, size, timeout = ticket.rank, ticket.size, timedelta(seconds=ticket.timeouts.join_s)
    collectives: Any
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # torch for CPUs has none

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        collectives = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl)
        collectives.eager_connect_single_device(device)  # now, while all are known to live
    else:
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        gloo._devices = [ProcessGroupGloo.create_device(hostname=own_address(ticket.host))]
        collectives = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, gloo)
    return ProcessRanks(collectives, rank, size, device)


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
