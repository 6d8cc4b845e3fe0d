"""Several controllers: which has a session, what each is told, and logs that are another number's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from manual_clock import ManualClock
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.deployments import Deployments
from controllers.errors import SettingsRefused, StoreError
from controllers.open_store import open_store
from controllers.rebalancing import AVERAGED_S, Rebalancing
from controllers.records import Checkpoint, TurnNote
from controllers.session_log.store import SessionStore
from controllers.settings import (
    ClusterSettings,
    Deployment,
    LogSettings,
    RebalancingSettings,
)
from controllers.shards import deployment_of_shard, shard_name, shard_of
from controllers.tokens import encode_tokens

OTHER_NUMBERS = [(1, 3), (3, 1), (2, 3)]


def opened(log: LogSettings, shards: int, shard: int = 0) -> SessionStore:
    return open_store(replace(log, shards=shards, shard=shard), "cluster", lambda: 5.0)


def test_a_session_stays_at_its_shard() -> None:
    """Logs depend on these numbers."""
    names = ["anna-1", "tenant anna-1", "ä", "resp-0f"]
    assert [shard_of(name, 4) for name in names] == [2, 1, 1, 0]
    assert {shard_of(name, 1) for name in names} == {0}
    counts = Counter(shard_of(f"session-{number}", 8) for number in range(8000))
    assert all(900 < count < 1100 for count in counts.values())


def test_each_shard_has_an_actor_a_log_and_its_part_of_the_limits(log: LogSettings) -> None:
    settings = ClusterSettings(max_sessions=10, tenant_sessions=2, tenant_history_tokens=100)
    whole = Deployment("d", settings, replace(log, shards=3))
    parts = [deployment_of_shard(whole, shard) for shard in range(3)]
    assert [shard_name("kedge", shard) for shard in range(3)] == ["kedge", "kedge-1", "kedge-2"]
    assert len({str(part.log) for part in parts}) == 3
    limits = {
        (each.max_sessions, each.tenant_sessions, each.tenant_history_tokens)
        for each in (part.settings for part in parts)
    }
    assert limits == {(4, 1, 34)}
    alone = Deployment("d", settings, log)
    assert deployment_of_shard(alone, 0) == alone


def test_shards_move_no_more_sessions_together_than_one_controller() -> None:
    """Each sees the whole gap between two replicas."""

    def credit(shards: int) -> float:
        clock = ManualClock()
        rebalancing = Rebalancing(RebalancingSettings(shards=shards), clock)
        for _ in range(int(AVERAGED_S) + 4):
            rebalancing.report("busy", 9, ["idle"])
            rebalancing.report("idle", 0, ["busy"])
            clock.advance(1.0)
        rebalancing.report("busy", 9, ["idle"])
        return rebalancing._loads["busy"].credit_s

    assert credit(1) > 0
    assert credit(3) == pytest.approx(credit(1) / 3)


@pytest.mark.parametrize(("before", "now"), OTHER_NUMBERS)
def test_a_log_of_another_number_of_shards_is_not_opened(log: LogSettings, before: int, now: int) -> None:
    """Its sessions would be looked for where they are not, and found to be gone."""
    store = opened(log, before)
    store.open(SESSION)
    store.disconnect()
    for shard in range(now):
        with pytest.raises(StoreError, match=rf"controller\.shards: {before}, not {now}"):
            opened(log, now, shard)
    store = opened(log, before)
    assert [entry.session_id for entry in store.load_all_entries()] == ["s"]
    store.disconnect()


def test_shards_do_not_share_sessions(log: LogSettings) -> None:
    first, second = opened(log, 2, 0), opened(log, 2, 1)
    first.open(SESSION)
    assert list(second.load_all_entries()) == []
    second.open(SESSION)
    assert first.close("s")
    assert [entry.session_id for entry in second.load_all_entries()] == ["s"]
    for store in (first, second):
        store.disconnect()


@pytest.mark.parametrize(("before", "now"), OTHER_NUMBERS)
def test_a_running_controller_does_not_change_its_number(log: LogSettings, before: int, now: int) -> None:
    had = replace(log, shards=before)
    store = opened(log, before)
    deployments = Deployments(store, had, ClusterSettings())
    new = deployment_of_shard(Deployment("new", ClusterSettings(), replace(log, shards=now)), 0)
    with pytest.raises(
        SettingsRefused, match=rf"controller\.shards cannot be changed from {before} to {now}"
    ) as told:
        deployments.announce(new)
    assert told.value.param == "controller.shards"
    store.disconnect()


def test_a_copied_history_is_a_sessions_own(reopen: Callable[[], SessionStore]) -> None:
    """A fork of another shard's session: its log has nothing of the parent."""
    place = Checkpoint(1, b"digest", 2)
    note = TurnNote(-1, 0, 2, 4, place, True, b"hello")
    record = replace(SESSION, history=encode_tokens([1, 2, 3, 4]), tools="t")
    added = reopen().open(record, [note])
    assert (added.epoch, added.num_tokens) == (1, 4)
    store = reopen()
    (entry,) = store.load_all_entries()
    assert (entry.tokens, entry.turns) == (4, 0)
    loaded = store.load("s")
    assert (loaded.history, loaded.tools, loaded.checkpoints) == (record.history, "t", (place,))
    assert store.notes("s") == [note]
    append_turn(store, turn_of(0, 4, [5, 6]))
    store.fork("s", 3, replace(SESSION, session_id="child", open_key="c"))
    append_turn(store, turn_of(1, 2, [7]))
    assert history_of(store) == [1, 2, 7]
    assert store.close("s")
    assert history_of(store, "child") == [1, 2, 3]
    assert store.close("child")
    assert list(reopen().load_all_entries()) == []
