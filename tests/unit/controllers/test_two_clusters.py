"""Two clusters on one session log: a session belongs to the cluster that used it last, and the other cluster is
told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from store_turns import commit_turn
from two_clusters import IDLE_S, SILENCE_S, Side, Upgrade, next_turn, open_session

from controllers.errors import SessionExists, SessionNotFound, SessionTakenOver, StaleEpoch, StoreError
from controllers.records import Assignment, ForkOrder, ReplicaStatus, SessionRecord, SessionStatus
from controllers.session_claims import ABANDONED_GRACE_S
from controllers.session_log.redis_log import RedisLog
from controllers.tokens import unpack_tokens
from tests.unit.controllers.measured import measured


def test_a_newcomer_takes_nothing_before_traffic_moves(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    owner, held = upgrade.old.begin("s")
    assert upgrade.new.session_ids() == []
    upgrade.new.cluster.expire_idle()
    commit_turn(upgrade.old.cluster, next_turn(owner, held, [2]))
    open_session(upgrade.old, "later")
    upgrade.old.turn("later", [3])
    assert upgrade.old.begin("s") == (owner, upgrade.old.store.load("s"))
    assert unpack_tokens(upgrade.old.store.load("s").history).tolist() == [1, 2]


def test_the_first_turn_at_the_newcomer_takes_the_session_and_no_other(upgrade: Upgrade) -> None:
    for session_id in ("s", "stays"):
        open_session(upgrade.old, session_id)
        upgrade.old.turn(session_id, [1])
    upgrade.new.beat()
    upgrade.old.turn("s", [2])
    owner, held = upgrade.new.begin("s")
    assert (owner.epoch, owner.fresh, unpack_tokens(held.history).tolist()) == (2, True, [1, 2])
    assert upgrade.new.cluster.resolve("s", False, "").epoch == 2, "it is claimed once"
    commit_turn(upgrade.new.cluster, next_turn(owner, held, [3]))
    upgrade.old.turn("stays", [2])
    assert upgrade.new.session_ids() == ["s"]
    assert measured(upgrade.new.cluster, "controller_sessions_claimed") == 1


def test_a_session_that_is_opened_later_is_found(upgrade: Upgrade) -> None:
    upgrade.new.beat()
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    assert unpack_tokens(upgrade.new.begin("s")[1].history).tolist() == [1]


def test_a_turn_in_flight_at_the_former_cluster_is_stale(upgrade: Upgrade) -> None:
    """The turn can go on there from the history that the log then has, like a turn whose session moved."""
    open_session(upgrade.old)
    owner, held = upgrade.old.begin("s")
    upgrade.new.turn("s", [1])
    with pytest.raises(SessionTakenOver):
        commit_turn(upgrade.old.cluster, next_turn(owner, held, [2]))
    assert upgrade.old.session_ids() == []
    with pytest.raises(StaleEpoch):
        upgrade.old.cluster.load_session("s", owner.epoch, owner.replica_id)
    again, held = upgrade.old.begin("s")
    assert (again.epoch, unpack_tokens(held.history).tolist()) == (3, [1])


@pytest.mark.parametrize("news_first", [False, True])
def test_the_former_cluster_gives_a_session_back_and_up(upgrade: Upgrade, news_first: bool) -> None:
    """It hears that the session left by a sweep or by a refused change. A session that comes back is its own again."""
    open_session(upgrade.old)
    for index, side in enumerate([upgrade.new, upgrade.old, upgrade.new, upgrade.old]):
        upgrade.advance(40.0)  # after that time the log is told that a session is in use
        if news_first:
            upgrade.old.cluster.expire_idle()
            upgrade.new.cluster.expire_idle()
        side.turn("s", [index])
    assert unpack_tokens(upgrade.old.store.load("s").history).tolist() == [0, 1, 2, 3]
    assert upgrade.old.cluster.sessions()[0].epoch == 5
    upgrade.new.cluster.expire_idle()
    upgrade.old.cluster.expire_idle()
    assert (upgrade.old.session_ids(), upgrade.new.session_ids()) == (["s"], [])


def test_replicas_of_the_former_cluster_are_told_to_drop_it(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    owner, _ = upgrade.old.begin("s")
    held = SessionStatus("s", 1, 0, 0, 0.0, False)
    upgrade.new.begin("s")
    assert upgrade.old.report(owner.replica_id, held).stale_sessions == ()
    upgrade.old.cluster.expire_idle()
    assert upgrade.old.report(owner.replica_id, held).stale_sessions == ("s",)
    assert measured(upgrade.old.cluster, "controller_sessions_taken_over") == 1
    assert upgrade.old.cluster.expire_idle() == []


def test_a_restarted_controller_keeps_its_claims_at_once(upgrade: Upgrade) -> None:
    for session_id in ("s", "r"):
        open_session(upgrade.old, session_id)
    upgrade.new.turn("s", [1])
    before = upgrade.new.begin("s")[0]
    upgrade.new.restart()
    upgrade.old.restart()
    assert (upgrade.old.session_ids(), upgrade.new.session_ids()) == (["r"], ["s"])
    after, held = upgrade.new.begin("s")
    assert (after.replica_id, after.epoch, after.fresh) == (before.replica_id, before.epoch, False)
    commit_turn(upgrade.new.cluster, next_turn(after, held, [2]))


FORMER_OWNERS_CALLS: dict[str, Callable[[Side, Assignment, SessionRecord], object]] = {
    "load": lambda side, owner, _: side.cluster.load_session("s", owner.epoch, owner.replica_id),
    "commit": lambda side, owner, held: commit_turn(side.cluster, next_turn(owner, held, [2])),
    "close": lambda side, owner, _: side.cluster.close_session("s", "", owner.epoch),
    "fork": lambda side, owner, _: side.cluster.fork_session(
        "s", owner.epoch, owner.replica_id, ForkOrder("child", "key")
    ),
    "assign": lambda side, owner, _: side.store.assign("s", "old-2", owner.epoch + 1),
    "touch": lambda side, _, __: side.store.touch("s", 1.0),
}


@pytest.mark.parametrize("call", FORMER_OWNERS_CALLS)
def test_the_former_cluster_changes_nothing(upgrade: Upgrade, call: str) -> None:
    open_session(upgrade.old)
    owner, held = upgrade.old.begin("s")
    upgrade.new.turn("s", [1])
    before = upgrade.new.store.load("s"), upgrade.new.store.find("s")
    with pytest.raises(SessionTakenOver):
        FORMER_OWNERS_CALLS[call](upgrade.old, owner, held)
    assert (upgrade.new.store.load("s"), upgrade.new.store.find("s")) == before
    with pytest.raises(SessionNotFound):
        upgrade.new.store.find("child")


def test_tenants_and_namesakes_are_kept_apart_across_clusters(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    with pytest.raises(SessionNotFound):
        upgrade.new.cluster.resolve("s", False, "other")
    assert not upgrade.new.cluster.close_session("s", "other")
    assert upgrade.new.cluster.resolve("s", True, "other").epoch == 1
    with pytest.raises(SessionExists):
        open_session(upgrade.new)
    with pytest.raises(SessionExists):
        upgrade.old.cluster.fork_session("s", 1, upgrade.old.begin("s")[0].replica_id, ForkOrder("s", "key"))
    assert not upgrade.new.cluster.resolve("new", True, "").epoch > 1
    assert upgrade.new.cluster.resolve("s", True, "").epoch == 2


def test_a_session_is_closed_through_either_cluster(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    assert upgrade.new.cluster.close_session("s", "")
    assert not upgrade.new.cluster.close_session("s", "")
    with pytest.raises(SessionNotFound):
        upgrade.old.turn("s", [2])
    open_session(upgrade.old)
    upgrade.new.turn("s", [1])
    assert upgrade.old.cluster.close_session("s", ""), "its ledger still has it, its log does not"
    assert not upgrade.new.cluster.close_session("s", "")


@pytest.mark.parametrize("closed", ["commit", "load", "open"])
def test_a_session_that_the_other_cluster_closed_is_forgotten(upgrade: Upgrade, closed: str) -> None:
    """This works before a sweep tells of the close."""
    open_session(upgrade.old)
    owner, held = upgrade.old.begin("s")
    upgrade.new.cluster.close_session("s", "")
    if closed == "open":
        assert upgrade.old.cluster.open_session("s", "", None, None).epoch == 3
        return
    with pytest.raises(SessionNotFound):
        FORMER_OWNERS_CALLS[closed](upgrade.old, owner, held)
    assert upgrade.old.session_ids() == []


def test_a_namesake_starts_above_the_epochs_of_both_clusters(upgrade: Upgrade) -> None:
    upgrade.new.beat()
    open_session(upgrade.old)
    for side in (upgrade.new, upgrade.old, upgrade.new):
        side.turn("s", [1])
    upgrade.new.cluster.close_session("s", "")
    assert upgrade.old.cluster.open_session("other", "", None, None).epoch == 5
    assert upgrade.old.cluster.close_session("s", "") is False
    assert upgrade.old.cluster.resolve("s", True, "").epoch == 5


def test_idle_sessions_of_a_cluster_that_lives_are_its_own(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.advance(IDLE_S + SILENCE_S + ABANDONED_GRACE_S + 1)
    assert upgrade.new.cluster.expire_idle() == []
    assert upgrade.old.cluster.expire_idle() == ["s"]


def test_idle_sessions_of_a_cluster_that_is_gone_end(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.advance(IDLE_S)
    open_session(upgrade.old, "young")
    upgrade.gone("old")
    upgrade.advance(ABANDONED_GRACE_S)
    assert upgrade.new.cluster.expire_idle() == []
    upgrade.advance(1)
    assert upgrade.new.cluster.expire_idle() == ["s"]
    with pytest.raises(SessionNotFound):
        upgrade.new.begin("s")
    upgrade.new.begin("young")


def test_a_claimed_session_is_in_use(upgrade: Upgrade) -> None:
    """The session was past its timeout, but nobody had ended it."""
    open_session(upgrade.old)
    upgrade.gone("old")
    upgrade.advance(10 * IDLE_S)
    owner, held = upgrade.new.begin("s")
    assert upgrade.new.cluster.expire_idle() == []
    commit_turn(upgrade.new.cluster, next_turn(owner, held, [1]))


def test_a_claim_whose_answer_was_lost_is_found_again(upgrade: Upgrade) -> None:
    """The log says that the session is this cluster's, but the ledger does not know it."""
    open_session(upgrade.old)
    upgrade.new.store.claim("s", "new-1")
    owner, _ = upgrade.new.begin("s")
    assert (owner.replica_id, owner.epoch) == ("new-1", 2)


@contextmanager
def answers_lost() -> Iterator[None]:
    """Redis makes changes, and nobody hears of them."""
    honest = RedisLog.change_each

    def lost(self: RedisLog, changes: Any) -> list[bool]:
        honest(self, changes)
        raise StoreError("no answer")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RedisLog, "change_each", lost)
        yield


def test_an_open_whose_answer_was_lost_is_repeated(upgrade: Upgrade) -> None:
    """The repeated call used to be refused with 400 session_exists."""

    def opened(key: str) -> Assignment:
        return upgrade.old.cluster.open_session("s", "", None, None, key)

    with answers_lost(), pytest.raises(StoreError):
        opened("mine")
    with pytest.raises(SessionExists):
        opened("another's")
    assert (opened("mine").epoch, opened("mine").open_key) == (1, "mine")
    upgrade.old.turn("s", [1])


def test_one_that_is_not_repeated_ends_as_any_other(upgrade: Upgrade) -> None:
    """No ledger had it. It stayed in the log until the controller was started again."""
    with answers_lost(), pytest.raises(StoreError):
        open_session(upgrade.old)
    upgrade.advance(IDLE_S + ABANDONED_GRACE_S)
    assert upgrade.old.cluster.expire_idle() == []
    upgrade.advance(1)
    assert upgrade.new.cluster.expire_idle() == [], "its cluster lives"
    assert upgrade.old.cluster.expire_idle() == ["s"]
    with pytest.raises(SessionNotFound):
        upgrade.old.store.find("s")
    told = upgrade.old.cluster.watch.view(None, 0).events
    assert [event.kind for event in told if event.session_id == "s"] == ["taken_over", "closed"]


def test_a_fork_whose_answer_was_lost_is_repeated(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.old.turn("s", [1, 2])
    owner = upgrade.old.begin("s")[0]

    def forked(key: str, length: int = 1) -> SessionRecord:
        order = ForkOrder("child", key, length)
        return upgrade.old.cluster.fork_session("s", owner.epoch, owner.replica_id, order)

    with answers_lost(), pytest.raises(StoreError):
        forked("mine")
    for key, length in (("another's", 1), ("mine", 2)):
        with pytest.raises(SessionExists):
            forked(key, length)
    assert forked("mine") == forked("mine")
    upgrade.old.turn("child", [3])
    assert unpack_tokens(upgrade.old.store.load("child").history).tolist() == [1, 3]


def test_a_repeated_fork_is_where_its_parent_is_now(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.old.turn("s", [1, 2])
    cluster = upgrade.old.cluster
    former = upgrade.old.begin("s")[0]
    with answers_lost(), pytest.raises(StoreError):
        cluster.fork_session("s", former.epoch, former.replica_id, ForkOrder("child", "mine", 1))
    cluster.report_unreachable(former.replica_id, True)
    owner = upgrade.old.begin("s")[0]
    assert owner.replica_id != former.replica_id
    child = cluster.fork_session("s", owner.epoch, owner.replica_id, ForkOrder("child", "mine", 1))
    assert (child.replica_id, child.epoch) == (owner.replica_id, 2)
    assert cluster.resolve("child", False, "").replica_id == owner.replica_id


def test_a_takeover_whose_answer_was_lost_is_found_again(upgrade: Upgrade) -> None:
    """The next resolve places the session anew. It used to be refused with 409 stale_epoch when it chose another
    replica."""
    open_session(upgrade.old)
    cluster = upgrade.old.cluster
    lost = cluster.session("s").replica_id
    (other,) = set(upgrade.old.replicas) - {lost}
    cluster.report_unreachable(lost, True)
    with answers_lost(), pytest.raises(StoreError):
        cluster.resolve("s", False, "")
    cluster.register_replica(ReplicaStatus("old-3", 1000, 1000))
    cluster.register_replica(ReplicaStatus(other, 1000, 1000, sessions=100))
    cluster.report_unreachable(other, True)
    owner = cluster.resolve("s", False, "")
    assert owner.replica_id == "old-3"
    assert owner.epoch == 3


def test_what_others_took_is_read_however_much_it_is(upgrade: Upgrade) -> None:
    """A script of Redis cannot pass on 8,000 words at once. From then on idle sessions ended no more."""
    key = f"kedge:{{{upgrade.log_name}}}:taken:old"
    with upgrade.server.client() as client:
        client.hset(key, mapping={f"s{index}": 2 for index in range(9_000)})
        assert len(upgrade.old.store.changes().taken) == 9_000
        upgrade.old.store.changes()
        assert client.hlen(key) == 0


def test_what_others_took_is_told_again_if_redis_did_not_answer(upgrade: Upgrade) -> None:
    """It was deleted before the former cluster knew of it. Then that cluster counted the session, and its replica kept
    the KV, until the idle timeout."""
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    upgrade.new.turn("s", [2])
    with answers_lost(), pytest.raises(StoreError):
        upgrade.old.cluster.expire_idle()
    assert upgrade.old.session_ids() == ["s"]
    upgrade.old.cluster.expire_idle()
    assert upgrade.old.session_ids() == []


def test_a_session_that_came_back_is_not_taken_again(upgrade: Upgrade) -> None:
    open_session(upgrade.old)
    upgrade.old.turn("s", [1])
    upgrade.new.turn("s", [2])
    upgrade.old.cluster.expire_idle()
    upgrade.old.turn("s", [3])
    upgrade.old.cluster.expire_idle()
    upgrade.old.turn("s", [4])
    assert upgrade.old.session_ids() == ["s"]
    upgrade.new.turn("s", [5])
    upgrade.old.cluster.expire_idle()
    assert upgrade.old.session_ids() == []


def test_each_cluster_has_its_own_deployment(upgrade: Upgrade) -> None:
    upgrade.old.store.set_deployment("one")
    assert upgrade.new.store.deployment() is None
    upgrade.new.store.set_deployment("two")
    upgrade.old.restart()
    assert (upgrade.old.store.deployment(), upgrade.new.store.deployment()) == ("one", "two")


def test_all_idle_sessions_are_found_however_many_there_are(upgrade: Upgrade) -> None:
    ids = sorted(f"s{index}" for index in range(350))
    for session_id in ids:
        open_session(upgrade.old, session_id)
    upgrade.gone("old")
    upgrade.advance(IDLE_S + ABANDONED_GRACE_S + 1)
    ended = [session_id for _ in range(30) for session_id in upgrade.new.cluster.expire_idle()]
    assert sorted(ended) == ids
