"""The replicas in the cluster are those that the controller named last."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from controllers.errors import NoAnswer
from controllers.records import ReplicaStatus
from serving.background import BackgroundTasks
from serving.front.known_places import NOWHERE, Affinity
from serving.front.membership import HOLDERS_LOAD, NEWCOMERS_LOAD, Membership
from tests.unit.serving.replica_rig import WAIT_S, local_controller


class Controller:
    def __init__(self, *statuses: ReplicaStatus) -> None:
        self.statuses = list(statuses)
        self.away = False
        self.has_heard_all = True

    async def replicas(self, all_heard: bool = False) -> list[ReplicaStatus]:
        if self.away or (all_heard and not self.has_heard_all):
            raise NoAnswer("away")
        return self.statuses


def status(name: str, running: int = 0, seen_s: float = 1.0, draining: bool = False) -> ReplicaStatus:
    return ReplicaStatus(name, 100, 100, running=running, seen_s=seen_s, draining=draining)


def membership_of(controller: Controller, gone: list[str]) -> Membership:
    parts: tuple[object, ...] = (controller, gone.append, Random(1))
    return Membership(*parts)  # type: ignore[arg-type]


async def test_those_that_are_listed_no_more_are_told() -> None:
    gone: list[str] = []
    controller = Controller(status("a"), status("b"))
    membership = membership_of(controller, gone)
    await membership.look()
    assert (membership.present, gone) == (("a", "b"), [])
    controller.statuses.pop(0)
    await membership.look()
    assert (membership.present, gone) == (("b",), ["a"])


async def test_one_that_has_just_come_is_found() -> None:
    controller = Controller()
    membership = membership_of(controller, [])
    await membership.look()
    controller.statuses.append(status("a"))
    assert await membership.find("a") == status("a")
    assert await membership.find("b") is None


async def test_a_late_answer_to_another_question_takes_nobody_for_gone() -> None:
    """It was given before the last replica came, and arrives after the look that listed it."""
    gone: list[str] = []
    controller = Controller(status("a"), status("b"))
    membership = membership_of(controller, gone)
    await membership.look()
    controller.statuses.pop()
    await membership.learn()
    assert (membership.present, gone) == (("a", "b"), [])


async def test_while_the_controller_is_away_what_it_said_last_counts() -> None:
    gone: list[str] = []
    controller = Controller(status("a"))
    membership = membership_of(controller, gone)
    await membership.look()
    controller.away = True
    with pytest.raises(NoAnswer):
        await membership.look()
    assert (membership.present, membership.pick(), gone) == (("a",), "a", [])
    assert await membership.find("b") is None


async def test_a_controller_that_has_just_started_lets_no_replica_go() -> None:
    """Until their heartbeats arrived it listed no replica, and every front end gave up its links and turns."""
    gone: list[str] = []
    controller = Controller()
    controller.has_heard_all = False
    membership = membership_of(controller, gone)
    await membership.look()
    controller.statuses.append(status("a"))
    await membership.look()
    assert membership.present == ("a",), "a first look waits for nobody"
    controller.statuses.clear()
    await membership.look()
    controller.statuses.append(status("b"))
    await membership.look()
    assert membership.present == ("a", "b"), "one that has come is known"
    assert await membership.find("b") == status("b")
    controller.statuses.clear()
    assert (membership.present, gone) == (("a", "b"), [])
    controller.has_heard_all = True
    await membership.look()
    assert (membership.present, gone) == ((), ["a", "b"])


async def test_a_healthy_start_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each start warned three times that looks fail, until the controller had heard of all replicas."""
    controller: Any = local_controller(tmp_path)
    membership = Membership(controller, lambda _: None, Random(1))
    looked = asyncio.Semaphore(0)

    async def look() -> None:
        try:
            await membership.look()
        finally:
            looked.release()

    controller.cluster.register_replica(status("a"))
    tasks = BackgroundTasks()
    tasks.every(0.0, look, timeout_s=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await looked.acquire()
    await tasks.stop(WAIT_S)
    assert membership.present == ("a",)
    assert caplog.records == []


async def test_the_less_loaded_is_picked_and_what_was_sent_there_counts() -> None:
    controller = Controller(status("a", running=4), status("b", running=2))
    membership = membership_of(controller, [])
    await membership.look()
    with ExitStack() as turns:
        assert [sent(membership, turns) for _ in range(6)].count("b") == 4
        controller.statuses[1] = status("b", running=6, seen_s=2.0)  # a newer report includes these turns
        await membership.look()
        assert [sent(membership, turns) for _ in range(4)].count("b") == 2, "six turns are at either"
    assert {sent(membership, turns) for _ in range(2)} == {"b"}, "where others have two, and at a four"


def sent(membership: Membership, turns: ExitStack, affinity: Affinity = NOWHERE) -> str:
    """Picks a replica for a turn that ends with `turns`. Returns the replica's id."""
    picked = membership.pick(affinity)
    assert picked is not None
    turns.enter_context(membership.turn_at(picked))
    return picked


async def test_turns_that_have_ended_are_no_load() -> None:
    """A replica reports once a second, and turns that had ended since its report used to count as load. So some turns
    of eight clients with quick turns went to another replica."""
    controller = Controller(status("a"), status("b"))
    membership = membership_of(controller, [])
    await membership.look()
    for report in range(3):
        for _ in range(5):
            with ExitStack() as turns:
                assert {sent(membership, turns, Affinity("a")) for _ in range(HOLDERS_LOAD)} == {"a"}
        # The report counts the turns that ran a while ago. All of them have ended since.
        controller.statuses[0] = status("a", running=HOLDERS_LOAD, seen_s=2.0 + report)
        await membership.look()


async def test_turns_of_other_front_ends_are_load() -> None:
    controller = Controller(status("a", running=HOLDERS_LOAD), status("b"))
    membership = membership_of(controller, [])
    await membership.look()
    with ExitStack() as turns:
        assert sent(membership, turns, Affinity("a")) == "a"
        assert sent(membership, turns, Affinity("a")) == "b"
        controller.statuses[0] = status("a", running=HOLDERS_LOAD + 1, seen_s=2.0)
        await membership.look()
        assert sent(membership, turns, Affinity("a")) == "a", "b has one, too"


async def test_turns_at_a_replica_that_is_gone_end() -> None:
    controller = Controller(status("a"), status("b"))
    membership = membership_of(controller, [])
    await membership.look()
    with membership.turn_at("a"):
        controller.statuses.pop(0)
        await membership.look()
    with membership.turn_at("unknown"):
        assert membership.pick() == "b"


async def test_one_that_is_to_go_is_picked_only_where_there_is_no_other() -> None:
    controller = Controller(status("a", draining=True), status("b", running=50))
    membership = membership_of(controller, [])
    assert membership.pick() is None
    await membership.look()
    assert membership.pick() == "b"
    controller.statuses.pop()
    await membership.look()
    assert membership.pick() == "a"


async def test_one_that_has_refused_is_picked_only_where_there_is_no_other() -> None:
    controller = Controller(status("a"), status("b", running=50), status("c", draining=True))
    membership = membership_of(controller, [])
    assert not membership.has_other(())
    await membership.look()
    holder = Affinity("a", b"home")
    for refused_by, picked in (((), "a"), (("a",), "b"), (("b",), "a"), (("a", "b"), "a")):
        assert membership.pick(holder, refused_by) == picked
        assert membership.has_other(refused_by) == (len(refused_by) < 2)


def spread(membership: Membership, homes: list[bytes], *, goes_on: bool = True) -> list[str | None]:
    return [membership.pick(Affinity(home=home, goes_on=goes_on)) for home in homes]


HOMES = [b"%d" % number for number in range(300)]


async def test_front_ends_choose_the_same_replica_for_a_conversation() -> None:
    names = "abcd"
    controller = Controller(*map(status, names))
    first, second = membership_of(controller, []), membership_of(controller, [])
    for membership in (first, second):
        await membership.look()
    picked = spread(first, HOMES)
    assert spread(second, HOMES, goes_on=False) == picked
    assert min(picked.count(name) for name in names) > 50, "each has its share"
    controller.statuses.pop()
    await first.look()
    moved = [after for before, after in zip(picked, spread(first, HOMES), strict=True) if after != before]
    assert len(moved) == picked.count("d"), "only those of the one that went"


async def test_a_home_that_is_much_more_loaded_is_not_chosen() -> None:
    controller = Controller(status("a", running=NEWCOMERS_LOAD + 1), status("b"))
    membership = membership_of(controller, [])
    await membership.look()
    assert set(spread(membership, HOMES, goes_on=False)) == {"b"}
    assert set(spread(membership, HOMES)) == {"a", "b"}


async def test_who_has_what_was_said_comes_before_a_home() -> None:
    controller = Controller(status("a"), status("b"))
    membership = membership_of(controller, [])
    await membership.look()
    assert {membership.pick(Affinity("a", home)) for home in HOMES[:HOLDERS_LOAD]} == {"a"}
    assert membership.pick(Affinity("gone", b"1")) in ("a", "b")


async def test_a_new_session_is_preferred_where_calls_of_its_key_go() -> None:
    controller = Controller(*map(status, "abcdefgh"))
    membership = membership_of(controller, [])
    assert membership.preferred(Affinity(home=b"k")) is None, "none is known yet"
    await membership.look()
    assert membership.preferred(NOWHERE) is None
    for home in (b"k", b"l", b"m"):
        assert membership.preferred(Affinity(home=home)) == membership.pick(Affinity(home=home))
    assert membership.preferred(Affinity("c", b"k")) == "c"
