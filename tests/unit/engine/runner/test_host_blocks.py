"""Host memory for KV is pinned at the start, and used again. Here it is ordinary memory: a CPU pins nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.tiers import PoolPages
from engine import build_runner as composition
from engine.memory import MemoryShort
from engine.runner import host_blocks
from engine.runner.host_blocks import HostBlocks
from engine.runner.host_copies import HostCopies
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings

CPU = torch.device("cpu")
PAGE_BYTES = 2 * 2 * 4 * 8 * 4
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "BLOCK_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(host_blocks, "SLAB_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr("engine.runner.host_copies.PIECE_BYTES", 2 * PAGE_BYTES)


@pytest.fixture
def pinned_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is pinned in service."""
    sizes: list[int] = []

    def fetch(part: Tensor) -> Tensor:
        sizes.append(part.nbytes)
        return part.clone()

    monkeypatch.setattr(host_blocks, "fetch", fetch)
    return sizes


def pool() -> KVPool:
    made = make_kv_pool(KVLayout(2, 8, (None,)), CacheSettings(4, num_pages=10), torch.float32, CPU)
    made.full.kv_LJKSD.copy_(torch.rand(made.full.kv_LJKSD.shape, generator=torch.manual_seed(1)))
    return made


def pages(*full: int) -> PoolPages:
    return PoolPages(np.asarray(full, dtype=np.int32), np.asarray([], dtype=np.int32))


def test_all_of_it_is_pinned_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[int] = []
    real = host_blocks.pinned
    monkeypatch.setattr(host_blocks, "pinned", lambda size, *rest: slabs.append(size) or real(size, *rest))
    HostBlocks(11 * PAGE_BYTES, CPU)
    assert slabs == [4 * PAGE_BYTES, 4 * PAGE_BYTES, 2 * PAGE_BYTES], "whole blocks, no more than was given"
    HostBlocks(0, CPU)
    HostBlocks(PAGE_BYTES, CPU)
    assert len(slabs) == 3


def test_sessions_come_and_go_in_the_same_memory(pinned_late: list[int]) -> None:
    kv = pool()
    copies = HostCopies(kv, blocks=HostBlocks(4 * PAGE_BYTES, CPU))
    before = kv.full.kv_LJKSD.clone()
    for key in range(5):
        copies.save(key, pages(7, 2, 3)).result(WAIT_S)
        kv.full.kv_LJKSD.zero_()
        copies.load(key, pages(7, 2, 3)).result(WAIT_S)
        slots = [slot for page in (2, 3, 7) for slot in range(4 * page, 4 * page + 4)]
        assert torch.equal(kv.full.kv_LJKSD[:, :, :, slots], before[:, :, :, slots])
        kv.full.kv_LJKSD.copy_(before)
        copies.drop(key)
    assert pinned_late == []
    copies.close()


def test_where_blocks_run_out_memory_is_pinned_in_service(pinned_late: list[int]) -> None:
    kv = pool()
    copies = HostCopies(kv, blocks=HostBlocks(4 * PAGE_BYTES, CPU))
    copies.save(1, pages(0, 1, 2)).result(WAIT_S)
    copies.save(2, pages(3, 4, 5)).result(WAIT_S)
    assert pinned_late == [2 * PAGE_BYTES, PAGE_BYTES]
    copies.drop(2)
    copies.drop(1)
    copies.save(3, pages(6, 7, 8)).result(WAIT_S)
    assert len(pinned_late) == 2
    copies.close()


def test_a_save_that_fails_keeps_no_block(pinned_late: list[int]) -> None:
    copies = HostCopies(pool(), blocks=HostBlocks(4 * PAGE_BYTES, CPU))
    with pytest.raises(IndexError):
        copies.save(1, pages(0, 1, 99)).result(WAIT_S)
    copies.save(2, pages(0, 1, 2)).result(WAIT_S)
    assert pinned_late == []
    copies.close()


def test_memory_that_the_driver_does_not_pin_names_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_blocks, "pinned", refuse)
    with pytest.raises(MemoryShort, match=r"cache\.host_mib.*out of memory"):
        composition._pinned_blocks(8 * PAGE_BYTES, CPU)
