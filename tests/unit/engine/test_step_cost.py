"""A step costs the same at any history length: operations are counted, not timed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.distinct_tokens import DistinctTokens
from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import SequenceKV
from cache.session_cache import SessionAwareCache
from engine.api import TokenDelta
from engine.batch import ItemOutput, ModelOutput
from engine.scheduler import Scheduler
from engine.settings import SchedulerSettings
from engine.stats import EngineCounters
from engine.stops import StopCriteria
from tests.unit.engine.driver import Driver, Talk, greedy, request
from tests.unit.engine.test_request import GuardedHistory
from tests.unit.operations import bytecodes


@pytest.mark.parametrize("history_len", [100, 3000])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.2])
def test_a_continuing_turn_reads_nothing_of_its_history(
    history_len: int, repetition_penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = greedy(20, repetition_penalty=repetition_penalty)
    driver = Driver(num_pages=300, page_size=16, context_len=4096, chunk_size=512, max_batch_tokens=512)
    talk = Talk(driver, "s")
    talk.turn([1 + n % 90 for n in range(history_len)], 2, sampling=sampling)
    talk.turn([3], 2, sampling=sampling)
    history, chain = GuardedHistory(talk.history), driver.cache.empty_chain("")
    chain.extend(talk.history)
    sorted_out: list[int] = []
    extend = DistinctTokens.extend

    def counting(distinct: DistinctTokens, tokens: NDArray[np.uint32]) -> None:
        sorted_out.append(len(tokens))
        extend(distinct, tokens)

    monkeypatch.setattr(DistinctTokens, "extend", counting)
    driver.generate(
        request(
            "r", [5, 6, 7], sampling=sampling,
            history=history, history_len=len(history), history_chain=chain, session_id="s",
        )
    )  # fmt: skip
    penalizes = repetition_penalty != 1.0
    assert history.num_read == 2 + penalizes, (
        "the last token, which had no KV: to compute it, to name it, to see it"
    )
    assert sorted_out == [21] * penalizes, "what the turn before added"


def test_decoding_takes_one_page_per_border_and_never_rebuilds_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(num_pages=300, page_size=16, context_len=4096, chunk_size=512, max_batch_tokens=512)
    driver.add(request("r", [1 + n % 90 for n in range(2000)], 64))
    driver.step_until(lambda: len(driver.outcomes["r"].token_ids) >= 1)
    grown: list[int] = []
    grow = SequenceKV.grow

    def counting(kv: SequenceKV, pages, allocated_len: int) -> None:  # type: ignore[no-untyped-def]
        grown.append(len(pages))
        grow(kv, pages, allocated_len)

    monkeypatch.setattr(SequenceKV, "grow", counting)
    for _ in range(48):
        driver.step()
    assert (sum(grown), max(grown)) == (3, 1)


def test_a_request_that_waits_reads_its_history_once() -> None:
    driver = Driver(num_pages=16, page_size=4)
    driver.add(request("running", range(1, 40), 8))
    driver.step()
    history = GuardedHistory(range(60, 90))
    driver.add(request("waiting", [5], 8, history=history, history_len=30, session_id="s"))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.num_waiting == 1
    assert history.num_read == 30
    driver.run()


class Decoding:
    """`num_streams` sessions that decode with a model whose every token is 7."""

    def __init__(self, num_streams: int, history_len: int = 40) -> None:
        num_pages = num_streams * (history_len // 16 + 20)
        self.cache = SessionAwareCache(PrefixCache(PageAllocator(num_pages), 16))
        settings = SchedulerSettings(max_batch_tokens=10**6, chunk_size=10**6, max_running=num_streams)
        stops = StopCriteria(frozenset({2}), 10**6, 1000)
        self.scheduler = Scheduler(self.cache, stops, settings, EngineCounters())
        self.deltas: list[TokenDelta] = []
        for index in range(num_streams):
            new_tokens = [3 + (index + n) % 900 for n in range(history_len)]
            self.scheduler.add(request(f"r{index}", new_tokens, 200, session_id=f"s{index}"))
        self.step()

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        output = ModelOutput([ItemOutput((7,)) for _ in batch.items])
        self.deltas = self.scheduler.update(batch, output)


def test_a_step_costs_the_same_for_each_stream_however_many_there_are() -> None:
    """Counts 16 steps, in which each stream needs one new page."""

    def per_token(num_streams: int, history_len: int = 40) -> float:
        decoding = Decoding(num_streams, history_len)

        def steps() -> None:
            for _ in range(16):
                decoding.step()

        count = bytecodes(steps) / 16 / num_streams
        assert len(decoding.deltas) == num_streams
        return count

    few = per_token(8)
    assert few < 850
    assert per_token(128) <= few
    assert per_token(8, history_len=4000) <= few + 10
