"""Copies of KV pages in host memory and on disk, made and read back by threads beside the engine's steps.

On a GPU the copies go through pinned memory, on streams of their own that first wait for the steps issued before them.
While one piece is on its way over the link, its neighbour is gathered from the pages, or spread to them.
On a CPU they are plain copies, during which torch releases the GIL. Files have threads of their own, so that a copy to
or from host memory never waits for the disk, nor a read for a write.

Legend: L layers, J vectors of a head (kv_pool.py), K key/value heads, P pages of the pool, n pages copied, p tokens of
a page, D head size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from cache.tiers import PoolPages
from engine.device import CopyStream, Relay, pinned, send
from engine.runner.disk_store import DiskStore
from engine.runner.host_blocks import BLOCK_BYTES, HostBlocks
from engine.runner.kv_pool import KVPool, PagedKV

logger = logging.getLogger(__name__)

PIECE_BYTES = BLOCK_BYTES
"""The most that is gathered at once. A copy of any size takes device memory for three of them."""

_PAGE_DIM = 3

Piece = tuple[Tensor, Tensor]
"""A pool [L, J, K, P, p, D] and some of its pages [n]."""


class CopyLane:
    """A thread that runs copies one after another, with a stream of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, copy: Callable[[], None]) -> Future[None]:
        """The copy sees what steps issued before this call have written."""
        issued = self._stream.mark()

        def run() -> None:
            with self._stream.after(issued):
                copy()

        return self._thread.submit(run)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class HostCopies:
    """Owns what was saved, by key. Every method is called from the engine's thread.

    Copies pages of a model's `pool`, and of its `draft` model's, whose KV lies in the same pages of the full pool.
    Copies between device and host run one after another in the order of the calls; so do writes to the disk, and so do
    reads.
    """

    def __init__(
        self,
        pool: KVPool,
        draft: PagedKV | None = None,
        disk: DiskStore | None = None,
        blocks: HostBlocks | None = None,
    ) -> None:
        full = [pool.full] if draft is None else [pool.full, draft]
        self._full = [tensor for paged in full if paged.kv_LJKSD.shape[0] for tensor in _by_page(paged)]
        self._window = [] if pool.window is None else _by_page(pool.window)
        self._saved: dict[int, list[Tensor]] = {}
        self._disk = disk
        device = pool.full.kv_LJKSD.device
        self._blocks = blocks or HostBlocks(0, device)
        self._host_lane = CopyLane("kedge-kv-copies", device)
        self._write_lane = CopyLane("kedge-kv-writes", device)
        self._read_lane = CopyLane("kedge-kv-reads", device)
        self._host_relay, self._read_relay = Relay(device), Relay(device)  # one for each lane

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        """A save that fails (for lack of memory) leaves nothing under `key`."""

        def copy() -> None:
            copies: list[Tensor] = []
            try:
                with self._host_relay as relay:
                    for pool_LJKPpD, piece_n in _on_device(pieces):
                        part = pool_LJKPpD.index_select(_PAGE_DIM, piece_n)
                        with relay.second_half(part):
                            copies.append(self._blocks.copy_of(part))
            except BaseException:
                self._blocks.give_back(copies)
                raise
            self._saved[key] = copies

        pieces = self._pieces(pages)
        return self._host_lane.submit(copy)

    def spill(self, source: int, key: int) -> Future[None]:
        """`source` must be saved already, and may be dropped only after this is done."""
        disk = self._disk
        assert disk is not None
        saved = self._saved[source]
        return self._write_lane.submit(lambda: disk.write(key, saved))

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        """Reads from the disk piece by piece, which takes little host memory."""
        disk, pieces = self._disk, self._pieces(pages)
        if disk is not None and key in disk:
            return self._read_lane.submit(
                lambda: _fill(self._read_relay, pieces, disk.read(key, map(_blank, pieces)))
            )
        return self._host_lane.submit(lambda: _fill(self._host_relay, pieces, self._saved[key]))

    def drop(self, key: int) -> None:
        disk = self._disk
        if disk is not None and key in disk:
            # Ahead of the write that takes its room.
            self._write_lane.submit(lambda: disk.remove(key)).add_done_callback(_log_failure)
        else:
            self._blocks.give_back(self._saved.pop(key))

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        """Runs on the engine's thread, in the stream of its steps, without waiting. No page may be both source and
        target."""
        for (pool_LJKPpD, from_n), (_, to_n) in zip(self._pieces(source), self._pieces(target), strict=True):
            there_n, here_n = (
                send(part_n.tolist(), torch.int64, pool_LJKPpD.device) for part_n in (from_n, to_n)
            )
            pool_LJKPpD.index_copy_(_PAGE_DIM, here_n, pool_LJKPpD.index_select(_PAGE_DIM, there_n))

    def close(self) -> None:
        """Waits for running copies, and forgets everything. A write to disk is cut short."""
        if self._disk is not None:
            self._disk.stop()
        for lane in (self._host_lane, self._write_lane, self._read_lane):
            lane.close()
        if self._disk is not None:
            self._disk.close()
        self._saved.clear()

    def _pieces(self, pages: PoolPages) -> list[Piece]:
        """Each pool [L, J, K, P, p, D] with some of its pages [n], at most PIECE_BYTES together."""
        pools = [(pool_LJKPpD, pages.full) for pool_LJKPpD in self._full]
        pools += [(pool_LJKPpD, pages.window) for pool_LJKPpD in self._window]
        pieces: list[Piece] = []
        for pool_LJKPpD, array in pools:
            index_n = torch.from_numpy(array.astype("int64"))  # a copy: the caller may change its own
            stride = max(1, PIECE_BYTES * pool_LJKPpD.shape[_PAGE_DIM] // pool_LJKPpD.nbytes)
            pieces += [(pool_LJKPpD, index_n[at : at + stride]) for at in range(0, len(index_n), stride)]
        return pieces


def _log_failure(removed: Future[None]) -> None:
    if (error := removed.exception()) is not None:
        logger.warning("a file of KV could not be removed, and takes room until this process ends: %s", error)


def _fill(relay: Relay, pieces: Sequence[Piece], parts: Iterable[Tensor]) -> None:
    """Fills pages from host memory [L, J, K, n, p, D]."""
    with relay:
        for (pool_LJKPpD, piece_n), host_LJKnpD in zip(_on_device(pieces), parts, strict=True):
            part_LJKnpD = host_LJKnpD.to(pool_LJKPpD.device, non_blocking=True)
            with relay.second_half(part_LJKnpD):
                pool_LJKPpD.index_copy_(_PAGE_DIM, piece_n, part_LJKnpD)


def _on_device(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with their pages' numbers on the device, sent all at once: torch waits for the stream after it has sent
    ordinary memory, so between two pieces the link would stand idle."""
    if not pieces:
        return []
    numbers = torch.cat([piece_n for _, piece_n in pieces]).to(pieces[0][0].device)
    parts = numbers.split_with_sizes([len(piece_n) for _, piece_n in pieces])
    return [(pool_LJKPpD, piece_n) for (pool_LJKPpD, _), piece_n in zip(pieces, parts, strict=True)]


def _blank(piece: Piece) -> Tensor:
    """Host memory [L, J, K, n, p, D] for the content of the pages."""
    pool_LJKPpD, piece_n = piece
    shape = list(pool_LJKPpD.shape)
    shape[_PAGE_DIM] = len(piece_n)
    return pinned(math.prod(shape), pool_LJKPpD.dtype, pool_LJKPpD.device).view(shape)


def _by_page(paged: PagedKV) -> list[Tensor]:
    """Views [L, J, K, P, p, D] of the pool and, with D = 1, of its scales. An fp8 pool is copied as bytes, since few
    operators support fp8."""
    layers, vectors, heads, _, dim = paged.kv_LJKSD.shape
    shape = (layers, vectors, heads, paged.num_pages, paged.page_size)
    if paged.scales_LJKS is None:
        return [paged.kv_LJKSD.view(*shape, dim)]
    return [paged.kv_LJKSD.view(torch.uint8).view(*shape, dim), paged.scales_LJKS.view(*shape, 1)]
