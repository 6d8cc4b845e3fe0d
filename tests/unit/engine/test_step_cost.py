"""A step costs the same at any history length: operations are counted, not timed."""

from __future__ import annotations

import pytest

from cache.sequence_kv import SequenceKV
from tests.unit.engine.driver import Driver, Talk, request
from tests.unit.engine.test_request import GuardedHistory


@pytest.mark.parametrize("history_len", [100, 3000])
def test_a_continuing_turn_reads_nothing_of_its_history(history_len: int) -> None:
    driver = Driver(num_pages=300, page_size=16, context_len=4096, chunk_size=512, max_batch_tokens=512)
    talk = Talk(driver, "s")
    talk.turn([1 + n % 90 for n in range(history_len)], 2)
    history, chain = GuardedHistory(talk.history), driver.cache.empty_chain("")
    chain.extend(talk.history)
    driver.generate(
        request(
            "r", [5, 6, 7], 20,
            history=history, history_len=len(history), history_chain=chain, session_id="s",
        )
    )  # fmt: skip
    assert history.num_read == 2, "the last token, whose KV was never computed: to compute it and to name it"


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
