"""A disk that reads slowly, or hangs: only the sessions whose KV is on it wait for it, and they not for ever."""

from __future__ import annotations

import pytest

import cache.disk_reads
from cache.disk_reads import READ_PATIENCE_S
from engine.api import EngineOverloaded, FinishReason
from tests.unit.controllers.manual_clock import ManualClock
from tests.unit.engine.driver import VOCAB, Driver, Talk, request
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.null_runner import null_generate

PROMPT = list(range(1, 21))


def put_on_disk(driver: Driver, session_id: str) -> None:
    slot = driver.cache._slots.get(session_id)
    assert slot is not None
    driver.cache.tiers.demote(slot)
    driver.check()
    driver.end_copies()
    driver.check()
    driver.end_disk_copies()
    driver.check()
    assert driver.cache.places([session_id])[session_id].tier == "disk"


def test_beside_a_slow_read_one_running_request_gives_way_to_the_other() -> None:
    """Both need more pages than the read leaves. They used to wait for its end."""
    driver = Driver(num_pages=16, page_size=4, host_pages=6, disk_pages=100, copies_wait=True)
    talk = Talk(driver, "s")
    talk.turn(PROMPT, 2)
    put_on_disk(driver, "s")
    driver.cache.flush()
    driver.add(request("a", [95] * 8, 28))
    driver.add(request("b", [94] * 8, 28))
    spec = talk.spec([6], 4)
    driver.add(spec)
    driver.step()
    driver.step()
    assert len(driver.runner._disk_copies) == 1
    for _ in range(40):
        driver.step()
    assert driver.outcomes["a"].reason is FinishReason.LENGTH
    assert len(driver.outcomes["b"].token_ids) > 8, "b goes on in a's pages"
    assert driver.counters.retractions > 0
    assert driver.outcomes[spec.request_id].finish is None
    assert len(driver.runner._disk_copies) == 1, "the read has not ended"
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])
    assert driver.outcomes["b"].token_ids == driver.oracle([94] * 8, 28)


def test_the_first_request_is_not_retracted_for_a_read_that_will_end() -> None:
    driver = Driver(num_pages=12, page_size=4, host_pages=6, disk_pages=100, copies_wait=True)
    talk = Talk(driver, "s")
    talk.turn(PROMPT, 2)
    put_on_disk(driver, "s")
    driver.cache.flush()
    driver.add(request("a", [95] * 8, 36))
    driver.add(talk.spec([6], 4))
    for _ in range(40):
        driver.step()
    assert driver.counters.retractions == 0
    assert driver.outcomes["a"].finish is None
    driver.run()
    assert driver.outcomes["a"].token_ids == driver.oracle([95] * 8, 36)
    assert driver.counters.retractions == 0


def on_disk(rig: Rig, session_id: str) -> list[int]:
    """Runs the session's first turn and moves its KV to disk. Returns its history."""
    history = PROMPT + rig.generate(request(f"{session_id}/1", PROMPT, 2, session_id=session_id)).token_ids
    tiers, slots = rig.engine._cache.tiers, rig.engine._cache._slots

    def demote() -> None:
        slot = slots.get(session_id)
        assert slot is not None
        tiers.demote(slot)

    rig.engine._call(demote).result(WAIT_S)
    for end in (rig.runner.end_copies, rig.runner.end_disk_copies):
        while not rig.engine._call(lambda: rig.runner._copies or rig.runner._disk_copies).result(WAIT_S):
            pass
        rig.engine._call(end).result(WAIT_S)
    while rig.engine.session_places([session_id]).result(WAIT_S)[session_id].tier != "disk":
        pass
    return history


def next_turn(rig: Rig, session_id: str, history: list[int]) -> None:
    rig.submit(
        request(f"{session_id}/2", [7], 6, history=history, history_len=len(history), session_id=session_id)
    )


def reads_under_way(rig: Rig) -> int:
    return rig.engine._call(lambda: rig.engine._cache.tiers.reads.count).result(WAIT_S)


def test_a_turn_whose_read_hangs_computes_what_it_waited_for() -> None:
    clock = ManualClock()
    with running(num_pages=64, host_pages=6, disk_pages=100, copies_wait=True, clock=clock) as rig:
        history = on_disk(rig, "s")
        next_turn(rig, "s", history)
        while not reads_under_way(rig):
            pass
        clock.advance(READ_PATIENCE_S - 1)
        assert reads_under_way(rig) == 1
        assert rig.outcomes["s/2"].finish is None
        clock.advance(1)
        rig.check()
        (outcome,) = rig.wait("s/2")
        assert outcome.token_ids == null_generate([*history, 7], 6, VOCAB)
        rig.check()
        assert rig.engine._call(lambda: len(list(rig.engine._cache.tiers.orphans))).result(WAIT_S) == 1, (
            "the read may still write to its pages"
        )
        rig.engine._call(rig.runner.end_disk_copies).result(WAIT_S)
        assert reads_under_way(rig) == 0
        rig.check()
        rig.engine.stop(WAIT_S)
        stats = rig.engine.stats()
    assert (stats.disk_failures, stats.demotions_to_log, stats.disk.used_bytes) == (1, 1, 0)


def test_an_engine_in_which_all_wait_for_a_read_that_hangs_wakes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache.disk_reads, "READ_PATIENCE_S", 0.05)
    with running(num_pages=64, host_pages=6, disk_pages=100, copies_wait=True) as rig:
        history = on_disk(rig, "s")
        next_turn(rig, "s", history)
        (outcome,) = rig.wait("s/2")
        assert outcome.token_ids == null_generate([*history, 7], 6, VOCAB)
        assert reads_under_way(rig) == 1


def test_while_a_disk_hangs_nothing_more_is_read_from_it() -> None:
    clock = ManualClock()
    with running(num_pages=64, host_pages=7, disk_pages=100, copies_wait=True, clock=clock) as rig:
        histories = {name: on_disk(rig, name) for name in ("s", "t")}
        next_turn(rig, "s", histories["s"])
        while not reads_under_way(rig):
            pass
        clock.advance(READ_PATIENCE_S)
        next_turn(rig, "t", histories["t"])
        for name, outcome in zip("st", rig.wait("s/2", "t/2"), strict=True):
            assert outcome.token_ids == null_generate([*histories[name], 7], 6, VOCAB)
        assert reads_under_way(rig) == 1


def test_a_request_that_finds_no_room_beside_a_read_that_hangs_is_refused() -> None:
    """The pages that the read may still write to are nobody's. The request would fit without them."""
    clock = ManualClock()
    with running(num_pages=12, host_pages=6, disk_pages=100, copies_wait=True, clock=clock) as rig:
        history = on_disk(rig, "s")
        rig.engine.flush().result(WAIT_S)
        next_turn(rig, "s", history)
        while not reads_under_way(rig):
            pass
        rig.submit(request("a", [95] * 8, 36))
        rig.engine.abort("s/2")
        clock.advance(READ_PATIENCE_S)
        rig.check()
        (outcome,) = rig.wait("a")
        assert outcome.finish is not None
        assert isinstance(outcome.finish.error, EngineOverloaded)
        assert outcome.token_ids == null_generate([95] * 8, 36, VOCAB)[: len(outcome.token_ids)]
        rig.engine._call(rig.runner.end_disk_copies).result(WAIT_S)
        again = rig.generate(request("again", [95] * 8, 36))
        assert again.token_ids == null_generate([95] * 8, 36, VOCAB)
