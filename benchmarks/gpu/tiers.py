"""The host tier: a session's KV to pinned memory and back, against the link, and decode beside such copies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.attention import decode_case
from benchmarks.gpu.attention_scene import Heads, Scene, fill_pool
from benchmarks.gpu.stage import Stage, captured
from cache.tiers import PoolPages
from engine.attention.triton_backend import TritonAttention
from engine.device import pinned
from engine.runner.host_blocks import HostBlocks
from engine.runner.host_copies import HostCopies
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings

LOAD_TARGET = 0.8
PAGE_SIZE = 16
REPEATS = 5
BESIDE_S = 0.4
WAIT_S = 60.0
LINK_BYTES = 2**29
NONE = np.asarray([], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Session:
    """The KV of `tokens` in a model of `layers` layers with 8 key heads of 128: for 32 layers an 8 B-parameter
    Llama's."""

    tokens: int
    layers: int
    heads: int = 8
    dim: int = 128

    @property
    def pages(self) -> int:
        return self.tokens // PAGE_SIZE


LONG, DRY = Session(8192, 32), Session(64, 2, 2, 16)


class Rig:
    """A pool of random contents, and copies of scattered pages of it."""

    def __init__(self, stage: Stage, session: Session) -> None:
        self.stage = stage
        layout = KVLayout(session.heads, session.dim, (None,) * session.layers)
        settings = CacheSettings(page_size=PAGE_SIZE, num_pages=2 * session.pages)
        dtype = torch.bfloat16
        self.pool: KVPool = make_kv_pool(layout, settings, dtype, stage.device)
        fill_pool(self.pool, stage.generator(5))
        self.num_bytes = self.pool.full.kv_LJKSD.nbytes // 2
        blocks = HostBlocks(self.num_bytes + 2**26 if not stage.dry else 0, stage.device)
        self.copies = HostCopies(self.pool, blocks=blocks)
        order = np.random.default_rng(3).permutation(2 * session.pages).astype(np.int32)
        self.source, self.target = (PoolPages(part, NONE) for part in np.split(order, 2))

    def save(self) -> None:
        self.copies.save(1, self.source).result(WAIT_S)

    def save_again(self) -> None:
        self.copies.drop(1)
        self.save()

    def load(self) -> None:
        self.copies.load(1, self.target).result(WAIT_S)

    def is_right(self) -> bool:
        """Whether the pages that were loaded have what the saved ones have."""
        kv_LJKSD = self.pool.full.kv_LJKSD
        pool = kv_LJKSD.view(*kv_LJKSD.shape[:3], -1, PAGE_SIZE, kv_LJKSD.shape[4])
        there, here = (
            torch.from_numpy(pages.full.astype(np.int64)).to(pool.device)
            for pages in (self.source, self.target)
        )
        return torch.equal(pool.index_select(3, here), pool.index_select(3, there))


def run(stage: Stage) -> None:
    """Raises RuntimeError if a copy is not exact."""
    session = DRY if stage.dry else LONG
    item = f"{session.tokens:,} tokens of an 8 B Llama"
    link = link_rates(stage)
    rig = Rig(stage, session)
    try:
        times_s: dict[str, list[float]] = {"save": [], "load": []}
        for _ in range(REPEATS):
            times_s["save"].append(seconds(rig.save))
            times_s["load"].append(seconds(rig.load))
            if not rig.is_right():
                raise RuntimeError("what was loaded is not what was saved")
            fill_pool(rig.pool, stage.generator(6))
            rig.copies.drop(1)
        for (kind, all_s), limit in zip(times_s.items(), link, strict=True):
            median_s = statistics.median(all_s[1:])
            rate = rig.num_bytes / median_s
            target = LOAD_TARGET if kind == "load" else None
            stage.row(
                f"{kind} {item}", rate / 1e9, "GB/s", limit=limit / 1e9, share=rate / limit, target=target,
                note=f"{rig.num_bytes / 2**20:,.0f} MiB in {median_s * 1e3:.1f} ms; limit is one large copy",
                details={"seconds": all_s, "bytes": rig.num_bytes},
            )  # fmt: skip
        rig.save()
        for kind, copy in (("saves", rig.save_again), ("loads", rig.load)):
            beside(stage, f"decode beside {kind} of {item}", copy)
    finally:
        rig.copies.close()


def seconds(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def link_rates(stage: Stage) -> tuple[float, float]:
    """Bytes per second of one large copy to the host's pinned memory, and from it."""
    size = 2**16 if stage.dry else LINK_BYTES
    host, there = (
        pinned(size, torch.uint8, stage.device),
        torch.zeros(size, dtype=torch.uint8, device=stage.device),
    )

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            stage.synchronize()

        return size / min(seconds(copy) for _ in range(REPEATS))

    rates = rate(host, there), rate(there, host)
    for name, each in zip(("to the host", "from the host"), rates, strict=True):
        stage.row(f"link, one copy {name}", each / 1e9, "GB/s")
    return rates


def beside(stage: Stage, item: str, copy: Callable[[], object]) -> None:
    """The time of a decode's attention, which is bound by memory, alone and while copies run."""
    case = decode_case(2, 40, Heads(4, 2, 16)) if stage.dry else decode_case(64, 2048, Heads(32, 8, 128))
    scene = Scene(stage, case)
    fill_pool(scene.pool, stage.generator(8))
    step = TritonAttention(scene.pool).plan(scene.tables)

    def call(_: int) -> None:
        for layer in range(2):
            step(layer, scene.q_LNHD[layer], scene.kv_LN2KD[layer], scene.traits)

    replay: Callable[[], object] = partial(call, 0)
    if not stage.dry:
        call(0)
        replay, _ = captured(call, 1)
    alone_s = _median(stage, replay)
    with repeated(copy) as counts:
        beside_s = _median(stage, replay)
    stage.row(
        item, beside_s * 1e6, "us", limit=alone_s * 1e6, share=alone_s / beside_s,
        note=f"limit is decode alone; {counts[0]} copies meanwhile",
    )  # fmt: skip


def _median(stage: Stage, replay: Callable[[], object]) -> float:
    times_s: list[float] = []
    end_s = time.perf_counter() + (0.01 if stage.dry else BESIDE_S)
    while not times_s or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        for _ in range(1 if stage.dry else 10):
            replay()
        stage.synchronize_stream()
        times_s.append((time.perf_counter() - begin_s) / (1 if stage.dry else 10))
    return statistics.median(times_s)


@contextmanager
def repeated(copy: Callable[[], object]) -> Iterator[list[int]]:
    """Copies all the time in another thread; yields their number so far."""
    end, counts = threading.Event(), [0]

    def work() -> None:
        while not end.is_set():
            copy()
            counts[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join(WAIT_S)
