"""Every rank does what rank 0 does. The loss of one rank ends all."""

from __future__ import annotations

import errno
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.tiers import CopyKind, PoolPages
from engine.api import SamplingParams
from engine.batch import BatchItem, ModelOutput, SampleSpec, ScheduledBatch
from engine.parallel.lead import LeadRunner, all_done
from engine.parallel.protocol import RanksLost, RanksNotStarted
from tests.unit.engine.driver import VOCAB, Driver, Talk
from tests.unit.engine.null_runner import NullRunner
from tests.unit.engine.parallel.thread_follower import PATIENT, WAIT_S, RecordingRunner, led

SIZES: dict[str, Any] = {"num_pages": 48, "page_size": 4, "vocab_size": VOCAB, "max_context_len": 512}


def runners(count: int, **options: Any) -> list[RecordingRunner]:
    return [RecordingRunner(**SIZES, **options) for _ in range(count)]


def item(tokens: list[int], start: int = 0, pages: tuple[int, ...] = (0, 1, 2)) -> BatchItem:
    spec = SampleSpec(SamplingParams(temperature=0.0))
    return BatchItem("a", tokens, start, np.array(pages, dtype=np.int32), True, spec)


def pages(*full: int) -> PoolPages:
    return PoolPages(np.array(full, dtype=np.int32), np.array([], dtype=np.int32))


class LedDriver(Driver):
    """A scheduler, stepped by hand, over rank 0 of several. A copy ends on the driver's thread, after it has ended on
    all ranks."""

    def __init__(self, leading: LeadRunner, own: NullRunner, **options: Any) -> None:
        super().__init__(num_pages=SIZES["num_pages"], page_size=SIZES["page_size"], **options)
        self.leading = leading
        self.runner = own  # for what only a NullRunner has

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        return self.leading.launch(batch).result()

    def _carry_out(self) -> None:
        for order in self.cache.tiers.take_orders():
            if order.kind is CopyKind.DROP:
                self.leading.drop(order.key)
                continue
            if order.kind is CopyKind.SPILL:
                self.leading.spill(order.source, order.key).result(WAIT_S)
                self.cache.tiers.copy_done(order.key)
                continue
            assert order.pages is not None
            if order.kind is CopyKind.CLONE:
                assert order.target is not None
                self.leading.clone(order.pages, order.target)
                continue
            start = self.leading.save if order.kind is CopyKind.SAVE else self.leading.load
            start(order.key, order.pages).result(WAIT_S)
            self.cache.tiers.copy_done(order.key)


@pytest.mark.parametrize("method", ["off", "ngram", "draft"])
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windows"])
def test_followers_see_what_rank_0_sees(method: Any, windowed: bool) -> None:
    """Sessions with chunks, retractions, demotions to host and disk, windows and drafts. A follower reads its own KV
    through the pages that it was told of. With one wrong page it fails or gives other tokens."""
    window: dict[str, Any] = {"window_len": 10, "num_window_pages": 48} if windowed else {}
    rng = random.Random(11)
    own, *others = runners(3, **window)
    with led(own, *others) as (leading, team, _):
        driver = LedDriver(leading, own, speculation=method, host_pages=20, disk_pages=60, **window)
        talks = [Talk(driver, f"s{index}") for index in range(5)]
        for _ in range(12):
            chosen = rng.sample(talks, rng.randrange(1, 5))
            sampling = [
                SamplingParams(max_new_tokens=5, temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99))
                for _ in chosen
            ]
            specs = [
                talk.spec([rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))], sampling=params)
                for talk, params in zip(chosen, sampling, strict=True)
            ]
            for talk, spec, outcome in zip(chosen, specs, driver.generate(*specs), strict=True):
                talk.commit(spec, outcome)
        assert team.failure is None
        assert windowed or driver.cache.tiers.num_from_disk > 0
    expected = own.given()
    assert len(expected) > 40
    for other in others:
        assert other.given() == expected


def test_several_steps_and_pending_tokens() -> None:
    """Steps are launched before the result of the step before is taken in, some of them several at a time."""
    own, other = runners(2, runs_ahead=True)
    with led(own, other) as (leading, _, _):
        first = leading.launch(ScheduledBatch([item([5, 6, 7])]))
        pending = item([-1], 3)
        pending.pending_from = 0
        second = leading.launch(ScheduledBatch([pending], num_steps=4))
        assert len(first.result().items[0].token_ids) == 1
        assert len(second.result().items[0].token_ids) == 4
    assert other.given() == own.given()


def test_copies_end_when_all_have() -> None:
    own, other = runners(2, copies_wait=True)
    with led(own, other) as (leading, _, _):
        leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        saved = leading.save(1, pages(0))
        own.end_copies(1)
        time.sleep(0.05)
        assert not saved.done()
        _until(lambda: bool(other._copies))
        other.end_copies(1)
        assert saved.result(WAIT_S) is None
        leading.clone(pages(0), pages(7))
        loaded = leading.load(1, pages(5))
        _until(lambda: bool(other._copies))
        other.end_copies(1)
        own.end_copies(1)
        loaded.result(WAIT_S)
        leading.drop(1)
        again = [leading.launch(ScheduledBatch([item([9], 3, (page,))])).result() for page in (0, 5, 7)]
        assert again[0] == again[1] == again[2]
    assert other.given() == own.given()
    assert not other._saved


class NoRoom(RecordingRunner):
    def save(self, key: int, pages: PoolPages) -> Future[None]:
        if key != 1:
            return super().save(key, pages)
        failed: Future[None] = Future()
        failed.set_exception(MemoryError("no room"))
        return failed


class FullDisk(RecordingRunner):
    def spill(self, source: int, key: int) -> Future[None]:
        if key != 2:
            return super().spill(source, key)
        failed: Future[None] = Future()
        failed.set_exception(OSError(errno.ENOSPC, "disk full"))
        return failed


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_spill_that_fails_on_one_rank_leaves_nothing_on_the_others_disks(bad: int) -> None:
    ranks = [FullDisk(**SIZES) if rank == bad else RecordingRunner(**SIZES) for rank in range(3)]
    with led(ranks[0], *ranks[1:]) as (leading, team, _):
        leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        leading.save(1, pages(0)).result(WAIT_S)
        with pytest.raises(OSError, match="disk full") as fault:
            leading.spill(1, 2).result(WAIT_S)
        assert fault.value.errno == errno.ENOSPC, "the cache makes room for the next try"
        leading.spill(1, 3).result(WAIT_S)
        leading.drop(1)
        assert team.failure is None
    assert [(set(rank._saved), set(rank._spilled)) for rank in ranks] == [(set(), {3})] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_save_that_fails_on_one_rank_leaves_nothing_on_the_others(bad: int) -> None:
    ranks = [NoRoom(**SIZES) if rank == bad else RecordingRunner(**SIZES) for rank in range(3)]
    with led(ranks[0], *ranks[1:]) as (leading, team, _):
        leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        with pytest.raises(Exception, match="no room"):
            leading.save(1, pages(0)).result(WAIT_S)
        leading.save(2, pages(0)).result(WAIT_S)
        assert team.failure is None
    assert [set(rank._saved) for rank in ranks] == [{2}, {2}, {2}]


def test_other_pools_are_refused() -> None:
    own, other = RecordingRunner(**SIZES), RecordingRunner(**{**SIZES, "num_pages": 47})
    with pytest.raises(RanksNotStarted, match=r"rank 1 has .*num_pages=47"), led(own, other):
        pass


class Breaking(RecordingRunner):
    def execute(self, _: ScheduledBatch) -> ModelOutput:
        raise ValueError("this device is gone")


def test_a_follower_that_fails_ends_the_team_and_says_why() -> None:
    own, good, bad = RecordingRunner(**SIZES), RecordingRunner(**SIZES), Breaking(**SIZES)
    with led(own, good, bad) as (leading, team, threads):
        told = threading.Event()
        team.when_lost(told.set)
        with pytest.raises(RanksLost, match="rank 2 is gone: this device is gone"):
            _step_on(leading)
        assert told.wait(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S  # the callback comes before the kills
        while not all(thread.killed for thread in threads):
            assert time.monotonic() < deadline_s
        for call in (lambda: leading.save(1, pages(0)), lambda: leading.drop(1)):
            with pytest.raises(RanksLost, match="this device is gone"):
                call()


def test_copies_of_a_lost_rank_fail() -> None:
    own, other = runners(2, copies_wait=True)
    with led(own, other) as (leading, _, threads):
        leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        saved = leading.save(1, pages(0))
        own.end_copies(1)
        threads[0].kill()
        with pytest.raises(RanksLost, match="rank 1 is gone"):
            saved.result(WAIT_S)


def test_a_fault_of_rank_0_ends_the_team() -> None:
    """Other ranks may wait in a collective by then."""
    own, other = Breaking(**SIZES), RecordingRunner(**SIZES)
    with led(own, other) as (leading, team, threads):
        with pytest.raises(RanksLost, match="rank 0: ValueError: this device is gone"):
            leading.launch(ScheduledBatch([item([5, 6, 7])]))
        assert team.failure is not None
        assert threads[0].killed


class Hanging(RecordingRunner):
    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        self.released = getattr(self, "released", threading.Event())
        self.released.wait(10 * WAIT_S)
        return super().execute(batch)


def test_a_step_without_end_is_noticed() -> None:
    own, other = Hanging(**SIZES), RecordingRunner(**SIZES)
    own.released = threading.Event()
    with led(own, other, timeouts=replace(PATIENT, step_s=2.0)) as (leading, team, _):
        team.when_lost(own.released.set)  # an abort of the collectives has this effect
        begun_s = time.monotonic()
        with pytest.raises(RanksLost, match="a step has not ended"):
            leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        assert time.monotonic() - begun_s < WAIT_S


def test_all_done_gives_the_first_error() -> None:
    copies: list[Future[None]] = [Future() for _ in range(3)]
    together = all_done(copies)
    copies[2].set_exception(KeyError("late"))
    copies[1].set_exception(ValueError("early"))
    assert not together.done()
    copies[0].set_result(None)
    with pytest.raises(ValueError, match="early"):
        together.result(WAIT_S)


def _step_on(leading: LeadRunner) -> None:
    for _ in range(1000):
        leading.launch(ScheduledBatch([item([5, 6, 7])])).result()
        time.sleep(0.01)


def _until(condition: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
