"""Waiting requests are asked again only after a change that might let them in, and then they are asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cache.session_cache import SessionAwareCache
from engine.admission import LOOK_AHEAD
from engine.api import FinishReason
from tests.unit.engine.driver import Driver, Talk, request


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The sessions for which the cache was searched."""
    found: list[str | None] = []
    match_prefix = SessionAwareCache.match_prefix

    def counting(cache: SessionAwareCache, session_id: str | None, *rest):  # type: ignore[no-untyped-def]
        found.append(session_id)
        return match_prefix(cache, session_id, *rest)

    monkeypatch.setattr(SessionAwareCache, "match_prefix", counting)
    return found


class Crowd:
    """A pool of pages of four tokens. Each idle session has five pages, and four are left. One session is in host
    memory, and a request runs."""

    def __init__(self, num_idle: int = 8) -> None:
        self.driver = driver = Driver(
            num_pages=5 * num_idle + 4, page_size=4, host_pages=400, copies_wait=True, max_running=100,
            max_batch_tokens=256, chunk_size=64,
        )  # fmt: skip
        self.stored = Talk(driver, "stored")
        self.stored.turn(range(85, 90), 3)
        slot = driver.cache._slots.get("stored")
        assert slot is not None
        driver.cache.tiers.demote(slot)
        driver.check()
        driver.end_copies()
        for number in range(num_idle):
            Talk(driver, f"idle{number}").turn(random.Random(number).choices(range(1, 90), k=17), 3)
        driver.cache.flush()
        driver.add(request("runs", [95, 94, 93], 60))
        driver.step()

    def add_waiting(self, count: int) -> None:
        """Adds requests, each of which needs more pages than are free."""
        for number in range(count):
            self.driver.add(request(f"w{number}", random.Random(-number).choices(range(1, 90), k=30), 2))


@pytest.mark.parametrize("num_waiting", [20, 200])
def test_while_one_waits_for_a_copy_a_step_asks_nobody_again(
    num_waiting: int, asked: list[str | None]
) -> None:
    crowd = Crowd(num_idle=50)
    driver = crowd.driver
    crowd.add_waiting(num_waiting)
    per_step = []
    for _ in range(6):
        asked.clear()
        driver.step()
        per_step.append(len(asked))
    assert driver.copying
    assert 1 <= per_step[0] <= LOOK_AHEAD + 1
    assert per_step[1:] == [0] * 5
    for _ in range(12):
        driver.end_copies()
        asked.clear()
        before = driver.scheduler.num_waiting
        driver.step()
        admitted = before - driver.scheduler.num_waiting
        assert len(asked) <= admitted + LOOK_AHEAD + 1, "and the one that waits now"
    assert driver.scheduler.num_waiting < num_waiting


@pytest.mark.parametrize("num_waiting", [20, 200])
def test_while_one_waits_for_room_a_step_asks_nobody_again(num_waiting: int, asked: list[str | None]) -> None:
    driver = Driver(num_pages=16, page_size=4)
    driver.add(request("runs", range(1, 40), 12))
    driver.step()
    for number in range(num_waiting):
        driver.add(request(f"w{number}", [50 + (number + n) % 40 for n in range(24)], 2))
    driver.step_until(lambda: bool(driver.outcomes["runs"].token_ids))  # now its prompt may be shared
    driver.step()
    asked.clear()
    for _ in range(6):
        driver.step()
    assert not asked
    driver.step_until(lambda: driver.outcomes["w0"].finish is not None)
    assert 1 <= len(asked) <= 12


def test_who_comes_while_others_wait_has_its_kv_fetched(asked: list[str | None]) -> None:
    """Only the new request is asked: the pass continues after the requests that were passed over."""
    crowd = Crowd()
    driver = crowd.driver
    crowd.add_waiting(3)
    driver.step()
    driver.step()
    asked.clear()
    spec = crowd.stored.spec([7], 3)
    driver.add(spec)
    driver.step()
    assert asked == ["stored"]
    driver.step_until(lambda: driver.outcomes[spec.request_id].finish is not None)
    crowd.stored.commit(spec, driver.outcomes[spec.request_id])


def end(driver: Driver) -> None:
    driver.step_until(lambda: driver.outcomes["runs"].finish is not None)


def abort_of_a_running_one(driver: Driver) -> None:
    driver.abort("runs")


def abort_of_the_first_that_waits(driver: Driver) -> None:
    driver.abort("w0")


def a_copy_that_ends(driver: Driver) -> None:
    driver.end_copies(100)


@pytest.mark.parametrize(
    "change", [end, abort_of_a_running_one, a_copy_that_ends, abort_of_the_first_that_waits]
)
def test_after_a_change_they_are_asked_at_once(
    change: Callable[[Driver], None], asked: list[str | None]
) -> None:
    crowd = Crowd()
    driver = crowd.driver
    crowd.add_waiting(4)
    driver.step()
    driver.step()
    assert (driver.copying, driver.scheduler.num_waiting) == (True, 4)
    change(driver)
    asked.clear()
    driver.step()
    assert asked


def test_what_another_shares_lets_those_in_who_have_the_same_prompt() -> None:
    """The two requests do not fit side by side unless they share their prompt."""
    driver = Driver(num_pages=16, page_size=4, max_batch_tokens=64, chunk_size=64)
    prompt = [1 + n % 90 for n in range(40)]
    driver.add(request("first", prompt, 12))
    driver.step()
    driver.add(request("second", [*prompt[:36], 91], 4))
    driver.step_until(lambda: driver.outcomes["second"].finish is not None)
    assert driver.outcomes["first"].finish is None
    driver.run()
    assert driver.outcomes["first"].reason is driver.outcomes["second"].reason is FinishReason.LENGTH


def test_one_with_priority_is_asked_though_others_were_refused() -> None:
    driver = Driver(num_pages=16, page_size=4, max_batch_tokens=64, chunk_size=64)
    driver.add(request("runs", range(1, 40), 20))
    driver.step()
    driver.add(request("large", range(40, 80), 2))
    driver.step()
    driver.step()
    driver.add(request("small", [5, 6], 2, priority=1))
    driver.step_until(lambda: driver.outcomes["small"].finish is not None)
    assert driver.outcomes["runs"].finish is None
    driver.run()
