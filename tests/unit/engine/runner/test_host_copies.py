"""Pages that are saved and loaded, or cloned, have the same bits, and no other page changes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.tiers import PoolPages
from engine.runner import host_copies
from engine.runner.disk_encryption import Encrypted
from engine.runner.disk_folder import DiskFolder
from engine.runner.disk_store import DiskStore
from engine.runner.host_copies import HostCopies
from engine.runner.kv_pool import FP8, KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings

CPU = torch.device("cpu")
PAGE_SIZE = 4
WAIT_S = 30.0


def make_pool(windows: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> KVPool:
    """A pool filled with random bits, including the NaNs and infinities of the dtype."""
    settings = CacheSettings(PAGE_SIZE, num_pages=10, window_ratio=0.6)
    pool = make_kv_pool(KVLayout(2, 8, windows), settings, dtype, CPU)
    for paged in (pool.full, pool.window):
        if paged is not None:
            if paged.scales_LJKS is not None:
                paged.scales_LJKS.copy_(torch.rand(paged.scales_LJKS.shape, generator=torch.manual_seed(2)))
            bits = np.random.default_rng(1).integers(0, 256, paged.kv_LJKSD.nbytes, dtype=np.uint8)
            paged.kv_LJKSD.view(torch.uint8).copy_(
                torch.from_numpy(bits).view(paged.kv_LJKSD.view(torch.uint8).shape)
            )
    return pool


@pytest.fixture(params=[torch.float32, torch.bfloat16, FP8], ids=str)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[HostCopies, list[torch.Tensor]]]:
    """Copies, with a disk, over three pools, and the pools' bits by page [P, L, 2, K, p, D]: model, draft, window. In
    fp8 the bits of the scales follow."""
    pool, draft = make_pool((None, 9, None), request.param), make_pool((None,), request.param)
    copies = HostCopies(pool, draft.full, DiskStore(DiskFolder(tmp_path), Encrypted()))
    assert pool.window is not None
    pools = (pool.full, draft.full, pool.window)
    scales = [bits(paged.scales_LJKS[..., None]) for paged in pools if paged.scales_LJKS is not None]
    yield copies, [bits(paged.kv_LJKSD) for paged in pools] + scales
    copies.close()


def bits(kv_LJKSD: torch.Tensor) -> torch.Tensor:
    integers = kv_LJKSD.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[kv_LJKSD.dtype.itemsize])
    layers, two, heads, slots, dim = integers.shape
    return integers.view(layers, two, heads, slots // PAGE_SIZE, PAGE_SIZE, dim).movedim(3, 0)


def pages(full: list[int], window: list[int]) -> PoolPages:
    return PoolPages(np.asarray(full, dtype=np.int32), np.asarray(window, dtype=np.int32))


def moved(before: list[torch.Tensor], source: PoolPages, target: PoolPages) -> list[torch.Tensor]:
    expected = [tensor.clone() for tensor in before]
    for tensor, pool in zip(expected, cycle(("full", "full", "window")), strict=False):
        tensor[getattr(target, pool).tolist()] = tensor[getattr(source, pool).tolist()]
    return expected


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_save_and_load(
    rig: tuple[HostCopies, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", piece_bytes)
    copies, pools = rig
    before = [tensor.clone() for tensor in pools]
    source, target = pages([7, 2, 3], [5, 0]), pages([1, 9, 4], [2, 3])
    copies.save(11, source).result(WAIT_S)
    assert same(pools, before)
    for tensor in pools:
        tensor.zero_()
    copies.load(11, target).result(WAIT_S)
    expected = moved(before, source, target)
    for tensor, pool in zip(expected, cycle(("full", "full", "window")), strict=False):
        tensor[[page for page in range(len(tensor)) if page not in getattr(target, pool)]] = 0
    assert same(pools, expected)
    copies.drop(11)
    with pytest.raises(KeyError):
        copies.drop(11)


@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_by_way_of_the_disk(
    rig: tuple[HostCopies, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", piece_bytes)
    copies, pools = rig
    source, target = pages([7, 2, 3], [5, 0]), pages([1, 9, 4], [2, 3])
    expected = moved([tensor.clone() for tensor in pools], source, target)
    copies.save(11, source).result(WAIT_S)
    copies.spill(11, 12).result(WAIT_S)
    copies.drop(11)
    assert not copies._saved, "host memory is free again"
    copies.load(12, target).result(WAIT_S)
    assert same(pools, expected)
    assert len(files(tmp_path)) == 1
    copies.drop(12)
    copies.save(13, source)
    copies._write_lane.submit(lambda: None).result(WAIT_S)
    assert files(tmp_path) == []


def test_a_file_that_cannot_be_removed_is_told(
    rig: tuple[HostCopies, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies, _ = rig
    copies.save(1, pages([7], [5])).result(WAIT_S)
    copies.spill(1, 2).result(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        copies.drop(2)
        copies._write_lane.submit(lambda: None).result(WAIT_S)
    assert "could not be removed" in caplog.text


def refused(path: Path, *, missing_ok: bool = False) -> None:
    del missing_ok
    raise OSError(30, "Read-only file system", str(path))


def files(root: Path) -> list[Path]:
    return list(root.glob("*/*.kv"))


def test_no_copy_of_host_memory_and_no_read_waits_for_a_write(
    rig: tuple[HostCopies, list[torch.Tensor]],
) -> None:
    copies, _ = rig
    copies.save(1, pages([7, 2], [1])).result(WAIT_S)
    copies.spill(1, 4).result(WAIT_S)
    block = threading.Event()
    copies._write_lane.submit(lambda: assert_set(block))
    written = copies.spill(1, 2)
    copies.save(3, pages([4], [])).result(WAIT_S)
    copies.load(1, pages([5, 6], [2])).result(WAIT_S)
    copies.load(4, pages([5, 6], [2])).result(WAIT_S)
    assert not written.done()
    block.set()
    written.result(WAIT_S)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_a_write_that_fails_leaves_what_was_saved(
    rig: tuple[HostCopies, list[torch.Tensor]], tmp_path: Path
) -> None:
    copies, pools = rig
    source, target = pages([7, 2], [1]), pages([3, 5], [4])
    expected = moved([tensor.clone() for tensor in pools], source, target)
    copies.save(1, source).result(WAIT_S)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        copies.spill(1, 2).result(WAIT_S)
    copies.load(1, target).result(WAIT_S)
    assert same(pools, expected)


def test_close_does_not_wait_for_the_disk_to_take_everything(
    rig: tuple[HostCopies, list[torch.Tensor]], tmp_path: Path
) -> None:
    copies, _ = rig
    copies.save(1, pages([7, 2], [1])).result(WAIT_S)
    block = threading.Event()
    copies._write_lane.submit(lambda: assert_set(block))
    written = copies.spill(1, 2)
    closing = threading.Thread(target=copies.close)
    closing.start()
    block.set()
    closing.join(WAIT_S)
    assert written.done()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_clone(rig: tuple[HostCopies, list[torch.Tensor]]) -> None:
    copies, pools = rig
    source, target = pages([7, 2], []), pages([0, 4], [])
    expected = moved([tensor.clone() for tensor in pools], source, target)
    copies.clone(source, target)
    assert same(pools, expected)


def test_copies_run_in_order_beside_the_caller(rig: tuple[HostCopies, list[torch.Tensor]]) -> None:
    """A load may be asked for before its save is done. The caller may change the arrays that it passed."""
    copies, pools = rig
    source = pages([7, 2], [1])
    expected = moved([tensor.clone() for tensor in pools], source, pages([3, 5], [4]))
    block = threading.Event()
    copies._host_lane._thread.submit(block.wait)
    saved, loaded = copies.save(1, source), copies.load(1, pages([3, 5], [4]))
    source.full[:] = 0
    assert not saved.done()
    assert not loaded.done()
    block.set()
    loaded.result(WAIT_S)
    assert saved.done()
    assert same(pools, expected)


def test_nothing_to_copy(rig: tuple[HostCopies, list[torch.Tensor]]) -> None:
    copies, pools = rig
    before = [tensor.clone() for tensor in pools]
    copies.save(1, pages([], [])).result(WAIT_S)
    copies.load(1, pages([], [])).result(WAIT_S)
    copies.clone(pages([], []), pages([], []))
    assert same(pools, before)


def test_a_fault_is_the_futures() -> None:
    copies = HostCopies(make_pool((None,)))
    with pytest.raises(IndexError):
        copies.save(1, pages([99], [])).result(WAIT_S)
    with pytest.raises(KeyError):
        copies.load(1, pages([1], [])).result(WAIT_S)
    copies.save(1, pages([9], [])).result(WAIT_S)
    copies.close()


def test_close_waits_for_what_runs() -> None:
    pool = make_pool((5, 5))
    copies = HostCopies(pool)  # no layer has full attention, so only the window's pages are copied
    assert pool.window is not None
    first = bits(pool.window.kv_LJKSD)[2].clone()
    saved = copies.save(1, pages([3], [2]))
    loaded = copies.load(1, pages([4], [5]))
    copies.close()
    assert saved.done()
    assert loaded.done()
    assert torch.equal(bits(pool.window.kv_LJKSD)[5], first)
