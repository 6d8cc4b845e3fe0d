"""What a replica's heartbeats report of its sessions and their KV: only what is new, and soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from controllers.records import LedgerEntry, SessionReport
from serving.replica import reported_sessions
from serving.wire.controller_calls import ControllerCalls
from tests.unit.serving.local_service import local_client
from tests.unit.serving.replica_rig import Rig, call, local_controller, running_rig

WAIT_S = 10.0


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        yield rig


def entry(rig: Rig, session_id: str) -> LedgerEntry:
    return rig.controller.cluster.session(session_id)


def reports_of(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[SessionReport]:
    """The reports that the controller gets from now on."""
    reports: list[SessionReport] = []
    heartbeat = rig.controller.cluster.heartbeat

    def noted(status: Any, report: SessionReport) -> Any:
        reports.append(report)
        return heartbeat(status, report)

    monkeypatch.setattr(rig.controller.cluster, "heartbeat", noted)
    return reports


async def test_a_session_is_reported_when_something_of_it_has_changed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = {name: rig.open_session(name) for name in "stu"}
    for name, epoch in epochs.items():
        await rig.run(call([1, 2, 3], name), epoch)
    await rig.heartbeats.beat()
    assert all(entry(rig, name).size_bytes > 0 for name in epochs)
    reports = reports_of(rig, monkeypatch)
    for _ in range(3):
        await rig.heartbeats.beat()
    assert [(report.changed, report.dropped) for report in reports] == [((), ())] * 3
    before = entry(rig, "s").size_bytes
    await rig.run(call([4] * 20, "s"), epochs["s"])
    await rig.host.close("t", epochs["t"])
    await rig.settled()
    await rig.heartbeats.beat()
    assert [status.session_id for status in reports[-1].changed] == ["s"]
    assert reports[-1].dropped == ("t",)
    assert entry(rig, "s").size_bytes > before


async def test_kv_that_the_engine_drops_is_reported(rig: Rig) -> None:
    """The session itself has not changed."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2, 3], "s"), epoch)
    async with asyncio.timeout(WAIT_S):  # a heartbeat does not wait for a slow engine
        while not entry(rig, "s").size_bytes:
            await rig.heartbeats.beat()
        await asyncio.wrap_future(rig.engine.close_session("s"))
        while entry(rig, "s").size_bytes:
            await rig.heartbeats.beat()
    assert entry(rig, "s").reported_s is not None


async def test_conversations_without_a_session_are_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that came and went was reported as dropped, and kept for as long as a shard did not answer."""
    async with local_client(tmp_path) as (client, service):
        rig = service.rig
        reports = reports_of(rig, monkeypatch)
        said: list[dict[str, Any]] = []
        for text in ("hello", "again"):  # only from its second turn on is its KV kept
            said.append({"role": "user", "content": text})
            reply = await client.post(
                "/v1/chat/completions", json={"messages": said, "temperature": 0, "max_tokens": 4}
            )
            said.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
        (name,) = await asyncio.wrap_future(rig.engine.session_kv_tokens())
        assert name in rig.unnamed
        await rig.heartbeats.beat()
        rig.unnamed.forget_all()
        assert not await asyncio.wrap_future(rig.engine.session_kv_tokens())
        await rig.heartbeats.beat()
        assert [(report.changed, report.dropped) for report in reports] == [((), ())] * 2


async def test_the_engine_is_asked_the_less_often_the_more_sessions_it_looks_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine used to walk over all sessions between two steps, each second."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2, 3], "s"), epoch)
    asked = 0
    session_kv_tokens = rig.engine.session_kv_tokens

    def counted() -> Any:
        nonlocal asked
        asked += 1
        return session_kv_tokens()

    monkeypatch.setattr(rig.engine, "session_kv_tokens", counted)
    monkeypatch.setattr(reported_sessions, "KV_LOOKS_PER_S", 0.001)
    for _ in range(5):
        await rig.heartbeats.beat()
    assert asked == 1
    assert entry(rig, "s").size_bytes > 0


async def test_each_shard_hears_of_its_own_sessions_only(tmp_path: Path) -> None:
    """A shard would call sessions of another one stale, and the replica would drop them."""
    controllers = []
    for shard in range(2):
        (tmp_path / f"shard-{shard}").mkdir()
        controllers.append(local_controller(tmp_path / f"shard-{shard}"))
    calls: Any = ControllerCalls(cast(Any, controllers))
    async with running_rig(tmp_path, controller=calls) as rig:
        names = [f"s{number}" for number in range(8)]
        own = [[name for name in names if calls.shard_of(name) == shard] for shard in range(2)]
        assert all(own)
        await calls.register_replica(rig.heartbeats.status())
        for name in names:
            opened = await calls.open_session(name)
            await rig.run(call([1, 2, 3], name), opened.epoch)
        for shard, controller in enumerate(controllers):
            await rig.heartbeats.beat(shard)
            entries = controller.cluster.sessions()
            assert [each.session_id for each in entries] == own[shard]
            assert all(each.reported_s is not None for each in entries)
        assert len(rig.sessions) == len(names)
        told = await calls.figures(WAIT_S)
        assert not told.missing
        orphans = [each for each in told.joined if "orphaned" in each.name]
        assert not any(each.value for each in orphans)
        await rig.host.close(own[1][0], 1)
        for shard in range(2):
            await rig.heartbeats.beat(shard)
        held = [controller.cluster._replicas.present()[0].held for controller in controllers]
        assert held == [len(own[0]), len(own[1]) - 1]
