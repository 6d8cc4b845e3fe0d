"""What the watch reports of the engine's KV: shares by tenant, few of them by name; KV without a known session; and a
count of all walks over the pages."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import EngineStopped
from serving.replica import engine_answers
from serving.replica.kv_watch import MOST_TENANTS, by_tenant
from serving.settings.strict_settings import is_name
from tests.unit.serving.replica_rig import call, running_rig


def test_few_tenants_have_a_name() -> None:
    kv = {(f"t{number:02}", "device"): 100 - number for number in range(MOST_TENANTS + 3)}
    kv |= {("t00\0salt", "host"): 5, ("", "disk"): 1000}
    told = by_tenant(kv)
    assert told["t00", "device"] == 100
    assert told["t00", "host"] == 5, "a salt is no tenant of its own"
    assert told["no tenant", "disk"] == 1000
    assert len({tenant for tenant, _ in told}) == MOST_TENANTS + 2
    assert told["other tenants", "device"] == sum(100 - number for number in range(8, 11))
    assert sum(told.values()) == sum(kv.values())


def test_none_has_one_unless_the_operator_wants_it() -> None:
    kv = {("anna", "device"): 3, ("bert", "device"): 4, ("", "host"): 5}
    assert by_tenant(kv, 0) == {("other tenants", "device"): 7, ("no tenant", "host"): 5}


def test_a_tenant_may_have_any_name() -> None:
    """One named `other` was counted with all others, and one named `-` with callers that have none."""
    kv = {("other", "device"): 30, ("-", "device"): 20, ("", "device"): 4}
    kv |= {(f"t{number}", "device"): 10 for number in range(MOST_TENANTS)}
    told = by_tenant(kv)
    assert (told["other", "device"], told["-", "device"]) == (30, 20)
    assert not any(is_name(tenant) for tenant, _ in by_tenant({("a", "device"): 1, ("", "device"): 1}, 0))


async def test_kv_is_its_tenants(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        await rig.run(call([1, 2, 3], "s"), epoch)
        await rig.run(replace(call([9] * 20), tenant="anna"))
        await rig.kv_watch.look()
        assert rig.figure("kedge_tenant_kv_bytes", tenant="no tenant", tier="device") > 0
        assert rig.figure("kedge_tenant_kv_bytes", tenant="anna", tier="device") == 0, "it is in the tree"


async def test_an_orphan_is_one_in_two_looks(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        await rig.run(call([1, 2, 3], "s"), epoch)
        await rig.kv_watch.look()
        await rig.kv_watch.look()
        assert rig.figure("kedge_orphaned_sessions") == 0
        rig.sessions.drop("s")  # nobody frees the session's KV
        await rig.kv_watch.look()
        assert rig.figure("kedge_orphaned_sessions") == 0, "it may be on its way out"
        await rig.kv_watch.look()
        assert rig.figure("kedge_orphaned_sessions") == 1
        await rig.host.release("s") if rig.sessions.epoch("s") else await rig.host._free_kv("s")
        await rig.kv_watch.look()
        assert rig.figure("kedge_orphaned_sessions") == 0


async def test_each_walk_counts(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        report = await rig.kv_watch.audit()
        assert report.clean
        await rig.kv_watch.look()  # in the rig a walk is due at every look
        assert rig.figure("kedge_audits_total", result="clean") == 2
        assert rig.figure("kedge_audit_timestamp_seconds") > 1.7e9
        rig.engine.abandon()
        with pytest.raises(EngineStopped):
            await rig.kv_watch.audit()
        assert rig.figure("kedge_audits_total", result="failed") == 1
        await rig.kv_watch.look()  # must not raise
        assert rig.figure("kedge_audits_total", result="failed") == 2


async def test_a_walk_that_is_due_while_the_engine_is_silent_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_answers, "ENGINE_TIMEOUT_S", 0.01)
    async with running_rig(tmp_path) as rig:
        with monkeypatch.context() as silent:
            silent.setattr(rig.engine, "kv_census", Future)
            await rig.kv_watch.look()
        assert rig.figure("kedge_audits_total", result="failed") == 1
        assert rig.figure("kedge_audits_total", result="clean") == 0
