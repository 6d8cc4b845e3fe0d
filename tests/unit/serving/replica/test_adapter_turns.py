"""Turns with adapters of the model: a session may change its adapter, and no KV of one serves another."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.records import ForkOrder
from serving.wire.turns import TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of


def generated(history: list[int]) -> list[int]:
    return null_generate(history, 8, VOCAB_SIZE)


def cached(events: list[TurnEvent]) -> int:
    assert events[-1].error is None, events[-1].error
    return events[-1].cached_tokens


async def test_a_session_keeps_its_kv_while_its_turns_name_the_same_adapter(rig: Rig) -> None:
    """The null runner refuses to read another adapter's KV."""
    epoch = rig.open_session("s")
    history: list[int] = []
    found = []
    for adapter in ("a", "a", "b", "b", "", "", "a"):
        events = await rig.run(call([7], "s", adapter=adapter), epoch)
        history.append(7)
        assert tokens_of(events) == generated(history)
        history += tokens_of(events)
        found.append(cached(events))
    assert found == [0, 8, 0, 26, 0, 44, 0]
    await rig.host.close("s", epoch)
    await rig.books_are_empty()


async def test_a_fork_goes_on_from_its_parent_s_kv_with_its_parent_s_adapter(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([7], "s", adapter="a"), epoch)
    for child, adapter, shared in (("same", "a", True), ("other", "b", False), ("none", "", False)):
        await rig.host.fork("s", epoch, ForkOrder(child, f"key of {child}", None, None))
        child_epoch = rig.controller.cluster.resolve(child, False, "").epoch
        assert bool(cached(await rig.run(call([9], child, adapter=adapter), child_epoch))) == shared


async def test_a_session_goes_on_with_its_adapter_at_another_replica(rig: Rig, tmp_path: Path) -> None:
    epoch = rig.open_session("s")
    first = tokens_of(await rig.run(call([7], "s", adapter="a"), epoch))
    async with running_rig(tmp_path, controller=rig.controller, replica_id="b") as heir:
        cluster = rig.controller.cluster
        cluster.report_unreachable(rig.replica_id, True)
        cluster.register_replica(heir.host.status())
        epoch = cluster.resolve("s", False, "").epoch
        found = [await heir.run(call([9], "s", adapter="a"), epoch) for _ in range(2)]
    assert tokens_of(found[0]) == generated([7, *first, 9])
    assert [cached(events) > 0 for events in found] == [False, True]


async def test_an_adapter_that_this_replica_lacks_leaves_no_trace(rig: Rig) -> None:
    """A front end may have newer settings."""
    epoch = rig.open_session("s")
    for session, at in (("s", epoch), (None, None)):
        (event,) = await rig.run(call([7], session, adapter="new"), at)
        assert event.error is not None
        assert (event.error.status, event.error.code) == (503, "adapter_not_loaded")
        assert event.error.param == "model"
        assert event.error.retry_after_s is not None
    assert len(rig.unnamed) == 0
    assert cached(await rig.run(call([7], "s", adapter="a"), epoch)) == 0


async def test_a_key_is_of_a_turn_with_its_adapter(rig: Rig) -> None:
    epoch = rig.open_session("s")
    first = await rig.run(call([7], "s", key="k", adapter="a"), epoch)
    assert tokens_of(await rig.run(call([7], "s", key="k", adapter="a"), epoch)) == tokens_of(first)
    (event,) = await rig.run(call([7], "s", key="k"), epoch)
    assert event.error is not None
    assert event.error.code == "idempotency_conflict"


@pytest.mark.parametrize("salt", ["", "salt"])
async def test_prefixes_are_shared_within_a_tenant_s_adapter(rig: Rig, salt: str) -> None:
    prompt = list(range(1, 30))
    for tenant in ("acme", "other"):
        for adapter in ("", "a", "b"):
            calls = [call(prompt, tenant=tenant, adapter=adapter, cache_salt=salt) for _ in range(2)]
            assert [cached(await rig.run(each)) for each in calls] == [0, 28]
