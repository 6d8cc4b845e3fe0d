"""Planted faults: each is seen where it should be, its report names the culprit, and it is undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from serving.debug.controller_faults import FaultyStore, plant_in_controller
from serving.debug.kinds import FaultKind
from serving.debug.replica_faults import BY, ReplicaFaults
from serving.front.api.debug import PATH, FaultBody, routes
from serving.front.http import create_http_app
from serving.settings.config import check_file, parse_args
from serving.settings.strict_settings import SettingsError
from serving.wire.calls import PlantFault
from serving.wire.turns import ServiceError
from tests.unit.serving.local_service import client_of, local_service
from tests.unit.serving.replica_rig import Rig, call, running_rig

MODEL = {"path": "assets/models/kedge-chat"}


@asynccontextmanager
async def rig_with_session(directory: Path) -> AsyncIterator[tuple[Rig, ReplicaFaults, int]]:
    async with running_rig(directory) as rig:
        epoch = rig.open_session("s")
        await rig.run(call(list(range(5, 25)), "s"), epoch)
        yield rig, ReplicaFaults(rig.engine, rig.host, rig.heartbeats, rig.tasks), epoch


async def audit_of(rig: Rig) -> Any:
    return await asyncio.wrap_future(rig.engine.audit())


def order(kind: FaultKind, for_s: float = 60.0, **fields: Any) -> PlantFault:
    return PlantFault(kind.value, for_s, **fields)


MEND = PlantFault()


async def test_a_leaked_page_has_no_account_and_is_named_with_its_session(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, _):
        planted = await faults.plant(order(FaultKind.LEAK_PAGE, session_id="s"))
        report = await audit_of(rig)
        (finding,) = report.findings
        assert (finding.kind, finding.page) == ("leaked", planted["page"])
        assert (finding.last.operation, finding.last.holder.session_id) == ("allocated", "s")
        assert report.pools["full"].leaked == 1
        assert await faults.plant(MEND) == {"mended": ["leak_page"]}
        assert (await audit_of(rig)).clean


async def test_a_page_counted_twice_is_named_with_both(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, _):
        planted = await faults.plant(order(FaultKind.DOUBLE_COUNT))
        report = await audit_of(rig)
        (finding,) = report.findings
        assert (finding.kind, finding.page) == ("doubly accounted", planted["page"])
        assert any(BY in account for account in finding.accounts)
        assert report.pools["full"].leaked == -1
        await faults.plant(MEND)
        assert (await audit_of(rig)).clean


async def test_a_fault_ends_in_time_by_itself(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, _):
        await faults.plant(order(FaultKind.LEAK_PAGE, for_s=0.01))
        async with asyncio.timeout(10.0):
            while not (await audit_of(rig)).clean:
                await asyncio.sleep(0.005)
        assert await faults.plant(MEND) == {"mended": []}


@pytest.mark.parametrize(
    ("kind", "outcome"), [(FaultKind.REFUSE_TURNS, "overloaded"), (FaultKind.FAIL_TURNS, "error")]
)
async def test_refused_turns_count_as_what_they_are(tmp_path: Path, kind: FaultKind, outcome: str) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, epoch):
        await faults.plant(order(kind))
        (event,) = await rig.run(call([7], "s"), epoch)
        assert event.error is not None
        assert BY in event.error.message
        assert rig.figure("kedge_turns_total", outcome=outcome) == 1
        await faults.plant(MEND)
        assert (await rig.run(call([7], "s"), epoch))[-1].finish is not None


async def test_a_lost_session_is_loaded_again_by_its_next_turn(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, epoch):
        await rig.heartbeats.beat()
        await faults.plant(order(FaultKind.LOSE_SESSION))
        assert rig.sessions.epoch("s") is None
        await rig.heartbeats.beat()
        (orphaned,) = (
            measure
            for measure in rig.controller.cluster.measures()
            if measure.name == "controller_orphaned_sessions" and ("kind", "missing") in measure.labels
        )
        assert orphaned.value == 1
        assert rig.controller.cluster.session("s").replica_id == rig.replica_id
        assert (await rig.run(call([7], "s"), epoch))[-1].finish is not None
        await faults.plant(MEND)


async def test_slow_steps_and_a_stalled_engine_end_with_the_fault(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, epoch):
        await faults.plant(order(FaultKind.SLOW_STEPS, delay_s=0.01))
        assert (await rig.run(call([7], "s"), epoch))[-1].finish is not None
        await faults.plant(order(FaultKind.STALL_ENGINE))
        turn = asyncio.create_task(rig.run(call([8], "s"), epoch))
        await rig.begun()
        assert not turn.done()
        assert await faults.plant(MEND) == {"mended": ["slow_steps", "stall_engine"]}
        assert (await turn)[-1].finish is not None
        assert rig.engine._runner is rig.runner  # type: ignore[attr-defined]


async def test_a_silent_replica_speaks_again(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, faults, _):
        cluster = rig.controller.cluster
        await faults.plant(order(FaultKind.STOP_HEARTBEATS))
        before = cluster.replicas()
        await rig.heartbeats.beat()
        assert cluster.replicas() == before
        await faults.plant(MEND)
        await rig.heartbeats.beat()
        assert cluster.replicas() != before


async def test_without_an_idle_session_there_is_nothing_to_damage(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        faults = ReplicaFaults(rig.engine, rig.host, rig.heartbeats, rig.tasks)
        for kind, session_id in ((FaultKind.LEAK_PAGE, None), (FaultKind.DOUBLE_COUNT, "nobody")):
            with pytest.raises(ServiceError) as refused:
                await faults.plant(order(kind, session_id=session_id))
            assert (refused.value.info.status, refused.value.info.param) == (409, "session_id")


def test_a_faulty_log_is_slow_or_fails_for_its_time() -> None:
    class Log:
        def append_turns(self, records: Any) -> list[None]:
            return [None] * len(records)

        def find(self, name: str) -> str:
            return name

    now, waits = [0.0], list[float]()
    slow = FaultyStore(Log(), FaultKind.SLOW_COMMITS, 5.0, 2.0, clock=lambda: now[0], wait=waits.append)
    assert (slow.append_turns([]), slow.find("s"), waits) == ([], "s", [2.0])
    now[0] = 6.0
    slow.append_turns([])
    assert waits == [2.0]


async def test_commits_fail_until_they_are_mended(tmp_path: Path) -> None:
    async with rig_with_session(tmp_path) as (rig, _, epoch):

        class Controller:
            _cluster = rig.controller.cluster

        store = rig.controller.cluster.commits._store
        plant_in_controller(Controller, FaultKind.FAIL_COMMITS.value, 60.0, 0.0)
        turn = asyncio.create_task(rig.run(call([7], "s"), epoch))
        await rig.pending_commits(1)
        plant_in_controller(Controller, None, 0.0, 0.0)
        assert (await turn)[-1].finish is not None
        assert rig.controller.cluster.commits._store is store


async def test_the_call_is_for_operators_and_its_body_is_checked(tmp_path: Path) -> None:
    planted: list[FaultBody] = []

    async def plant(body: FaultBody) -> dict[str, Any]:
        planted.append(body)
        return {"kind": body.kind.value}

    async def mend() -> dict[str, Any]:
        return {"replicas": []}

    async with local_service(tmp_path) as service:

        def app(**options: Any) -> FastAPI:
            served = create_http_app(service, **options)
            served.include_router(routes(plant, mend))
            return served

        async with client_of(app()) as client:
            good = await client.post(PATH, json={"kind": "leak_page", "for_s": 5})
            assert (good.status_code, good.json()) == (200, {"kind": "leak_page"})
            bad = await client.post(PATH, json={"kind": "leak_page", "for_s": -1})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "for_s")
            assert (await client.post(PATH, json={"kind": "fire"})).status_code == 400
            assert (await client.delete(PATH)).json() == {"replicas": []}
        async with client_of(app(operators=False)) as client:
            assert (await client.post(PATH, json={"kind": "leak_page"})).status_code == 403
    assert len(planted) == 1


async def test_there_is_no_such_path_where_it_is_off(tmp_path: Path) -> None:
    async with local_service(tmp_path) as service, client_of(create_http_app(service)) as client:
        assert (await client.post(PATH, json={"kind": "leak_page"})).status_code == 404


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ("", "http_options.host is 0.0.0.0"),
        ("http_options: {host: 10.0.0.1}", "http_options.host is 10.0.0.1"),
        ("http_options: {host: 127.0.0.1}", None),
        ("http_options: {host: localhost}", None),
    ],
)
def test_it_is_refused_where_others_may_call(tmp_path: Path, options: str, setting: str | None) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{options}\napplications: [{{args: {{model: {MODEL}, debug: {{faults: true}}}}}}]\n")
    if setting is None:
        assert check_file(str(file))[0].debug.faults
        return
    with pytest.raises(SettingsError, match=setting):
        check_file(str(file))


def test_an_operators_port_must_be_loopback_too() -> None:
    args = parse_args(
        {
            "model": MODEL,
            "debug": {"faults": True},
            "ingress": {"operator_port": 8001, "operator_host": "0.0.0.0"},
        }
    )
    with pytest.raises(SettingsError, match=r"ingress\.operator_host"):
        args.refuse_faults_in_the_open("127.0.0.1")
    parse_args({"model": MODEL}).refuse_faults_in_the_open("0.0.0.0")
