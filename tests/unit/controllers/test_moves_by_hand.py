"""A session goes to the replica that an operator names, or to the best other one, if its owner asks for it."""

from __future__ import annotations

import pytest
from cluster_world import SILENCE_S, World, open_at_a

from controllers.errors import InvalidMove, NoReplica, SessionClosing, SessionNotFound, StaleEpoch, StoreError
from controllers.tokens import unpack_tokens
from tests.unit.controllers.measured import measured


@pytest.fixture
def world(world: World) -> World:
    """Replica "a" owns session "s". "b" has less free KV than "c"."""
    open_at_a(world)
    world.beat("c", free_tokens=2000)
    return world


def pass_silently(world: World, *beating: str) -> None:
    """Lets so much time pass that all replicas but these are gone."""
    for _ in range(int(SILENCE_S) + 2):
        world.clock.advance(1.0)
        world.cluster.tick()
        world.beat(*beating)


@pytest.mark.parametrize(("to", "taker"), [("b", "b"), (None, "c")])
def test_it_moves_at_the_next_epoch_with_its_history(world: World, to: str | None, taker: str) -> None:
    moved = world.cluster.move_session("s", 1, "a", to)
    assert (moved.replica_id, moved.epoch) == world.owner() == (taker, 2)
    assert list(unpack_tokens(world.cluster.load_session("s", 2, taker).history)) == [1, 2]
    with pytest.raises(StaleEpoch):
        world.cluster.load_session("s", 1, "a")
    assert measured(world.cluster, "ownership_transfers") == 1
    assert measured(world.cluster, "ownership_moved_by_operators") == 1, "it is no churn"
    event = world.cluster.watch.events.after(None)[0][-1]
    assert (event.kind, event.replica_id, event.to_replica_id) == ("moved", "a", taker)


def test_it_stays_where_it_is_to_be(world: World) -> None:
    assert world.cluster.move_session("s", 1, "a", "a").epoch == 1
    assert world.owner() == ("a", 1)


def test_only_its_owner_may_have_it_moved(world: World) -> None:
    for epoch, replica_id in ((0, "a"), (2, "a"), (1, "b")):
        with pytest.raises(StaleEpoch):
            world.cluster.move_session("s", epoch, replica_id, "c")
    with pytest.raises(SessionNotFound):
        world.cluster.move_session("unknown", 1, "a", "c")
    world.cluster.move_session("s", 1, "a", "b")
    with pytest.raises(StaleEpoch):  # repeats the call
        world.cluster.move_session("s", 1, "a", "b")
    assert world.owner() == ("b", 2)


def test_an_unknown_replica_is_named(world: World) -> None:
    with pytest.raises(InvalidMove, match="'z'") as caught:
        world.cluster.move_session("s", 1, "a", "z")
    assert caught.value.param == "to"


def test_one_that_is_gone_gets_none(world: World) -> None:
    pass_silently(world, "a", "c")
    with pytest.raises(InvalidMove, match="'b'"):
        world.cluster.move_session("s", 1, "a", "b")
    assert world.owner() == ("a", 1)


def test_one_that_drains_gets_none(world: World) -> None:
    world.cluster.drain_replica("c")
    with pytest.raises(NoReplica, match="draining") as caught:
        world.cluster.move_session("s", 1, "a", "c")
    assert caught.value.param == "to"
    assert world.cluster.move_session("s", 1, "a", None).replica_id == "b"


def test_without_another_replica_it_stays(world: World) -> None:
    pass_silently(world, "a")
    with pytest.raises(NoReplica):
        world.cluster.move_session("s", 1, "a", None)
    assert world.owner() == ("a", 1)


def test_one_that_is_to_be_closed_stays(world: World) -> None:
    world.cluster.close_after("s", 1, "turn")
    with pytest.raises(SessionClosing):
        world.cluster.move_session("s", 1, "a", "b")


def test_the_log_comes_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreError("the log is away")

    monkeypatch.setattr(world.store, "assign", away)
    with pytest.raises(StoreError):
        world.cluster.move_session("s", 1, "a", "b")
    assert world.owner() == ("a", 1)
