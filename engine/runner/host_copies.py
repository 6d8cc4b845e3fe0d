"""Copies of KV pages in host memory, made and read back by one thread beside the engine's steps.

On a GPU the copies run on a stream of their own that first waits for the steps issued before them, through pinned
memory; on a CPU they are plain copies, during which torch lets go of the interpreter.

Legend: L layers, K key/value heads, P pages of the pool, n pages copied, p tokens of a page, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from cache.tiers import PoolPages
from engine.device import CopyStream, fetch, send
from engine.runner.kv_pool import KVPool, PagedKV

PIECE_BYTES = 32 * 2**20
"""Most that is gathered at once: what a copy of any size takes of device memory."""

_PAGE_DIM = 3


class HostCopies:
    """Owns what was saved, by key. Every method is called from the engine's thread.

    `full` are the pools whose pages `PoolPages.full` names (the model's, and a draft model's), `window` is the one
    of `PoolPages.window`. Copies run one after another in the order they were asked for.
    """

    def __init__(self, full: Sequence[PagedKV], window: PagedKV | None) -> None:
        self._full = [tensor for paged in full if paged.kv_L2KSD.shape[0] for tensor in _by_page(paged)]
        self._window = [] if window is None else _by_page(window)
        self._stream = CopyStream(full[0].kv_L2KSD.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kedge-kv-copies")
        self._saved: dict[int, list[Tensor]] = {}

    @classmethod
    def of(cls, pool: KVPool, draft: PagedKV | None = None) -> HostCopies:
        """For a model's pool, and a draft model's beside it."""
        return cls([pool.full] if draft is None else [pool.full, draft], pool.window)

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        """A save that fails (no memory) leaves nothing under `key`."""

        def copy() -> None:
            self._saved[key] = [
                fetch(pool_L2KPpD.index_select(_PAGE_DIM, piece_n.to(pool_L2KPpD.device)))
                for pool_L2KPpD, piece_n in pieces
            ]

        pieces = self._pieces(pages)
        return self._submit(copy)

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        def copy() -> None:
            for (pool_L2KPpD, piece_n), host_L2KnpD in zip(pieces, self._saved[key], strict=True):
                device = pool_L2KPpD.device
                part_L2KnpD = host_L2KnpD.to(device, non_blocking=True)
                pool_L2KPpD.index_copy_(_PAGE_DIM, piece_n.to(device), part_L2KnpD)

        pieces = self._pieces(pages)
        return self._submit(copy)

    def drop(self, key: int) -> None:
        del self._saved[key]

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        """On the engine's thread, in the stream of its steps, which it does not wait for. No page is both source and
        target."""
        for (pool_L2KPpD, from_n), (_, to_n) in zip(self._pieces(source), self._pieces(target), strict=True):
            there_n, here_n = (
                send(part_n.tolist(), torch.int64, pool_L2KPpD.device) for part_n in (from_n, to_n)
            )
            pool_L2KPpD.index_copy_(_PAGE_DIM, here_n, pool_L2KPpD.index_select(_PAGE_DIM, there_n))

    def close(self) -> None:
        """Waits for copies that run, and forgets all."""
        self._thread.shutdown(wait=True)
        self._saved.clear()

    def _submit(self, copy: Callable[[], None]) -> Future[None]:
        issued = self._stream.mark()

        def run() -> None:
            with self._stream.after(issued):
                copy()

        return self._thread.submit(run)

    def _pieces(self, pages: PoolPages) -> list[tuple[Tensor, Tensor]]:
        """Each pool [L, 2, K, P, p, D] with pages [n] of it, at most PIECE_BYTES together."""
        pools = [(pool_L2KPpD, pages.full) for pool_L2KPpD in self._full]
        pools += [(pool_L2KPpD, pages.window) for pool_L2KPpD in self._window]
        pieces = []
        for pool_L2KPpD, array in pools:
            index_n = torch.from_numpy(array.astype("int64"))  # a copy: the caller may change its own
            stride = max(1, PIECE_BYTES * pool_L2KPpD.shape[_PAGE_DIM] // pool_L2KPpD.nbytes)
            pieces += [(pool_L2KPpD, index_n[at : at + stride]) for at in range(0, len(index_n), stride)]
        return pieces


def _by_page(paged: PagedKV) -> list[Tensor]:
    """Views [L, 2, K, P, p, D] of the pool and, with D = 1, of its scales. Of fp8 only the bits are copied: operators
    know little of it."""
    layers, two, heads, _, dim = paged.kv_L2KSD.shape
    shape = (layers, two, heads, paged.num_pages, paged.page_size)
    if paged.scales_L2KS is None:
        return [paged.kv_L2KSD.view(*shape, dim)]
    return [paged.kv_L2KSD.view(torch.uint8).view(*shape, dim), paged.scales_L2KS.view(*shape, 1)]
