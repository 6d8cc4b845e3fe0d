"""Failovers of Redis that lose changes of a session. Two clusters may share the log."""

from __future__ import annotations

import pytest
from store_turns import commit_turn
from two_clusters import Upgrade, next_turn, open_session

from controllers.errors import SessionExists, StaleEpoch
from controllers.tokens import unpack_tokens


def test_a_failover_of_redis_that_lost_changes_is_recovered_from(upgrade: Upgrade) -> None:
    """The log is then behind the ledger. Nobody could commit to the session any more. Now its next turn claims it."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    with upgrade.lost("s"):
        owner = upgrade.old.begin("s")[0]
        upgrade.old.cluster.report_unreachable(owner.replica_id, True)
        upgrade.old.turn("s", [2])
        assert upgrade.old.begin("s")[0].epoch == 2
        upgrade.old.beat()
    record = upgrade.old.turn("s", [3])
    assert (record.epoch, record.turn_index) == (3, 1)
    assert unpack_tokens(upgrade.old.store.load("s").history).tolist() == [1, 3]


def test_an_epoch_that_a_failover_lost_is_not_used_again(upgrade: Upgrade) -> None:
    """The turn of a replica that had built on a lost turn was appended to a history that it did not know: the session
    had come to the same epoch and number of turns again."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    cluster = upgrade.old.cluster
    with upgrade.lost("s"):
        cluster.report_unreachable(cluster.session("s").replica_id, True)
        upgrade.old.turn("s", [2])
        in_flight = next_turn(*upgrade.old.begin("s"), [3])
    cluster.report_unreachable(cluster.session("s").replica_id, True)
    upgrade.old.replicas = ("old-3",)
    upgrade.old.beat()
    upgrade.old.turn("s", [9])
    with pytest.raises(StaleEpoch):
        commit_turn(cluster, in_flight)
    assert unpack_tokens(upgrade.old.store.load("s").history).tolist() == [1, 9]


def test_the_epoch_of_a_claim_that_a_failover_lost_is_not_used_again(upgrade: Upgrade) -> None:
    """The cluster claimed the session at the same epoch once more, and took the turn that one of its replicas had built
    on a lost turn."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    with upgrade.lost("s"):
        upgrade.new.turn("s", [2])
        in_flight = next_turn(*upgrade.new.begin("s"), [3])
    upgrade.old.turn("s", [9])
    upgrade.new.begin("s")
    with pytest.raises(StaleEpoch):
        commit_turn(upgrade.new.cluster, in_flight)
    assert unpack_tokens(upgrade.new.store.load("s").history).tolist() == [1, 9]
    assert upgrade.old.begin("s")[0].epoch > in_flight.epoch


def test_a_turn_behind_one_that_a_failover_lost_is_not_committed_behind_another(upgrade: Upgrade) -> None:
    """Its replica had given it up and loaded the session again, at the same epoch. The commit that was on its way was
    then the next turn of another history."""
    open_session(upgrade.old)
    with upgrade.lost("s"):
        upgrade.old.turn("s", [1])
        given_up = next_turn(*upgrade.old.begin("s"), [2])
    upgrade.old.turn("s", [9])
    with pytest.raises(StaleEpoch):
        commit_turn(upgrade.old.cluster, given_up)
    assert unpack_tokens(upgrade.old.store.load("s").history).tolist() == [9]


def test_a_session_whose_claim_a_failover_lost_exists(upgrade: Upgrade) -> None:
    """It was refused as one that another cluster has, at each try."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    with upgrade.lost("s"):
        upgrade.new.turn("s", [2])
    with pytest.raises(SessionExists):
        open_session(upgrade.new)


def test_a_session_is_not_held_at_another_epoch_than_the_logs(upgrade: Upgrade) -> None:
    """Its owner asked for it again and again, since it never got the epoch that the ledger has."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    with upgrade.lost("s"):
        upgrade.old.cluster.report_unreachable(upgrade.old.cluster.session("s").replica_id, True)
        owner = upgrade.old.cluster.resolve("s", False, "")
        assert owner.epoch == 2
    with pytest.raises(StaleEpoch):
        upgrade.old.cluster.load_session("s", 2, owner.replica_id)
    owner, held = upgrade.old.begin("s")
    assert (owner.epoch, held.epoch) == (4, 4)
    commit_turn(upgrade.old.cluster, next_turn(owner, held, [2]))
