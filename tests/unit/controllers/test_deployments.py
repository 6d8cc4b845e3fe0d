"""The settings of the newest deployment count, in whatever order deployments announce themselves, and after every
restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from manual_clock import ManualClock

from controllers.attended_clock import TICK_S
from controllers.cluster_actor import ClusterController
from controllers.deployments import KEPT_IDS, Deployments
from controllers.errors import Overloaded, SettingsRefused, StoreError
from controllers.open_store import open_store
from controllers.records import ReplicaStatus, SessionReport
from controllers.session_log.store import SessionStore
from controllers.settings import (
    ClusterSettings,
    Deployment,
    LogSettings,
    RebalancingSettings,
    RedisLogSettings,
    SqliteLogSettings,
)

OLD = ClusterSettings(max_sessions=1, session_timeout_s=5.0, rebalancing=None)
NEW = ClusterSettings(max_sessions=2, session_timeout_s=60.0, rebalancing=RebalancingSettings(5.0, 9.0))


def test_an_earlier_deployment_never_comes_back(log: LogSettings, reopen: Callable[[], SessionStore]) -> None:
    """Replicas of the old deployment connect again while the new ones start. Ray restarts the actor with its first
    settings."""
    deployments = Deployments(reopen(), log, OLD)
    assert deployments.settings == OLD
    assert deployments.announce(Deployment("old", OLD, log))
    assert deployments.announce(Deployment("new", NEW, log))
    assert not deployments.announce(Deployment("old", OLD, log))
    assert deployments.settings == NEW
    again = Deployments(reopen(), log, OLD)
    assert again.settings == NEW
    assert not again.announce(Deployment("old", OLD, log))
    assert not again.announce(Deployment("new", NEW, log))
    assert again.settings == NEW
    assert again.announce(Deployment("back", OLD, log)), "the same settings, deployed once more"
    assert Deployments(reopen(), log, NEW).settings == OLD


def test_every_setting_outlives_a_restart(log: LogSettings, reopen: Callable[[], SessionStore]) -> None:
    changed = replace(
        NEW,
        replica_timeout_s=7.0,
        heartbeat_interval_s=2.0,
        placement_tokens=3,
        max_timeout_s=90.0,
        tenant_sessions=4,
        tenant_history_tokens=5,
    )
    default = ClusterSettings()
    same = [
        each.name for each in fields(changed) if getattr(changed, each.name) == getattr(default, each.name)
    ]
    assert same == [], "give each a value here that is not its default"
    Deployments(reopen(), log, OLD).announce(Deployment("d", changed, log))
    assert Deployments(reopen(), log, OLD).settings == changed


def test_what_another_version_wrote_is_read(log: LogSettings, reopen: Callable[[], SessionStore]) -> None:
    store = reopen()
    store.set_deployment(json.dumps({"ids": ["d"], "settings": {"max_sessions": 9, "later": 1}, "later": 2}))
    deployments = Deployments(store, log, OLD)
    assert deployments.settings == ClusterSettings(max_sessions=9)
    assert not deployments.announce(Deployment("d", NEW, log))
    for damaged in ("", "[]", "{}", '{"ids": [], "settings": 1}'):
        store.set_deployment(damaged)
        with pytest.raises(StoreError, match="its deployment cannot be read"):
            Deployments(store, log, OLD)


def test_no_more_ids_are_kept_than_can_be_of_use(
    log: LogSettings, reopen: Callable[[], SessionStore]
) -> None:
    store = reopen()
    deployments = Deployments(store, log, OLD)
    for index in range(KEPT_IDS + 5):
        deployments.announce(Deployment(f"d{index}", OLD, log))
    assert len(json.loads(store.deployment() or "")["ids"]) == KEPT_IDS


SQLITE = SqliteLogSettings("/a/sessions.sqlite3")
REDIS = RedisLogSettings("redis://a", "name")


@pytest.mark.parametrize(
    ("log", "wanted", "key"),
    [
        (SQLITE, SqliteLogSettings("/b/sessions.sqlite3"), "controller.state_dir"),
        (SQLITE, replace(SQLITE, full_sync=True), "controller.full_sync"),
        (SQLITE, REDIS, "controller.redis_url"),
        (REDIS, SQLITE, "controller.redis_url"),
        (REDIS, replace(REDIS, url="redis://b"), "controller.redis_url"),
        (REDIS, replace(REDIS, wait_replicas=1), "controller.redis_wait_replicas"),
        (
            replace(REDIS, wait_replicas=1),
            replace(REDIS, wait_replicas=1, wait_ms=9),
            "controller.redis_wait_ms",
        ),
    ],
)
def test_another_log_is_refused_by_name(
    log: LogSettings, wanted: LogSettings, key: str, tmp_path: Path, clock: ManualClock
) -> None:
    store = open_store(SqliteLogSettings(str(tmp_path / "any.db")), "cluster", clock)
    deployments = Deployments(store, log, OLD)
    with pytest.raises(SettingsRefused) as caught:
        deployments.announce(Deployment("d", NEW, wanted))
    assert caught.value.param == key
    assert caught.value.message.startswith(f"{key} cannot be changed from {log}")
    assert str(wanted) in caught.value.message
    assert "Set it back; or give controller.name another value" in caught.value.message
    assert deployments.settings == OLD
    assert store.deployment() is None
    store.disconnect()


def passes(clock: ManualClock, controller: ClusterController, time_s: float) -> None:
    """Lets time pass while the controller ticks. Time that it sleeps through would not count."""
    for _ in range(int(time_s / TICK_S)):
        clock.advance(TICK_S)
        controller._cluster.tick()


async def test_a_redeploy_takes_effect_and_keeps_sessions_and_replicas(
    log: LogSettings, clock: ManualClock
) -> None:
    """The controller used to keep its first settings for its whole life."""
    controller = ClusterController(OLD, log, "cluster", clock=clock, timer=clock)
    await controller.announce(Deployment("old", OLD, log))
    await controller.register_replica(ReplicaStatus("a", 1000, 1000))
    opened = await controller.open_session("first")
    with pytest.raises(Overloaded):
        await controller.open_session("second")
    await controller.announce(Deployment("new", NEW, log))
    await controller.announce(Deployment("old", OLD, log))
    assert await controller.resolve("first") == replace(opened, fresh=False)
    await controller.open_session("second")
    with pytest.raises(Overloaded):
        await controller.open_session("third")
    passes(clock, controller, 30.0)
    await controller.heartbeat(ReplicaStatus("a", 1000, 1000), SessionReport(1, 0))
    assert await controller.expire_idle() == [], "the timeout was 5 s and is 60 s"
    passes(clock, controller, 31.0)
    assert sorted(await controller.expire_idle()) == ["first", "second"]


async def test_a_redeploy_changes_how_soon_a_replica_counts_as_dead_and_what_is_evened_out(
    log: LogSettings, clock: ManualClock
) -> None:
    settings = ClusterSettings(replica_timeout_s=100.0, rebalancing=None)
    controller = ClusterController(settings, log, "cluster", clock=clock, timer=clock)
    for replica_id in ("a", "b"):
        await controller.register_replica(ReplicaStatus(replica_id, 1000, 1000))

    async def crowded() -> bool:
        for _ in range(2):
            passes(clock, controller, 9.0)
            await controller.heartbeat(ReplicaStatus("b", 1000, 1000), SessionReport(1, 0))
            reply = await controller.heartbeat(
                ReplicaStatus("a", 1000, 1000, running=50), SessionReport(1, 0)
            )
        return reply.crowded

    assert not await crowded()
    await controller.announce(Deployment("new", replace(settings, rebalancing=RebalancingSettings()), log))
    assert await crowded()
    passes(clock, controller, 50.0)
    assert len(await controller.replicas()) == 2
    await controller.announce(Deployment("newer", replace(settings, replica_timeout_s=10.0), log))
    assert await controller.replicas() == []
    assert not await crowded()
