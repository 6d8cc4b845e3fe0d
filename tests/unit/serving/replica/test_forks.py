"""Forks on one replica and over HTTP: they happen whole or not at all, share KV, work in any order and survive
failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from controllers.errors import SessionExists, StoreError, TurnInFlight
from controllers.records import ForkOrder, ReplicaStatus
from controllers.tokens import unpack_tokens
from engine.api import EngineError
from serving.replica import overlaps
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import local_client
from tests.unit.serving.replica_rig import REPLICA_ID, VOCAB_SIZE, Rig, call, tokens_of


async def say(rig: Rig, session_id: str, history: list[int], new: list[int]) -> int:
    """Runs a turn, checks it against the whole history and adds it to the history. Returns how many tokens had KV."""
    epoch = rig.controller.cluster.resolve(session_id, False, "").epoch
    events = await rig.run(call(new, session_id), epoch)
    assert events[-1].error is None, events[-1]
    assert tokens_of(events) == null_generate(history + new, 8, VOCAB_SIZE)
    assert events[-1].prompt_tokens == len(history) + len(new)
    history += new + tokens_of(events)
    return events[-1].cached_tokens


async def parent(rig: Rig, num_tokens: int = 40) -> list[int]:
    """Opens session "p" and runs one turn in it. Returns its history."""
    rig.open_session("p")
    history: list[int] = []
    await say(rig, "p", history, list(range(1, num_tokens + 1)))
    return history


@pytest.mark.parametrize("length", [None, 47, 33, 16, 8, 1, 0])
async def test_a_fork_goes_on_like_a_session_with_that_history(rig: Rig, length: int | None) -> None:
    history = await parent(rig)
    forked = await rig.host.fork("p", 1, ForkOrder("c", "k", length))
    tokens = len(history) if length is None else length
    assert (forked.session_id, forked.tokens) == ("c", tokens)
    assert forked.cached_tokens in (tokens, max(0, tokens - 1))
    of_child = history[:tokens]
    assert await say(rig, "c", of_child, [7, 8]) in (tokens, max(0, tokens - 1))
    assert await say(rig, "p", history, [9]) in (48, 47)
    await rig.host.close("p", 1)
    await say(rig, "c", of_child, [3])
    await rig.host.close("c", 1)
    await rig.books_are_empty()


async def test_forks_of_forks_end_in_any_order(rig: Rig) -> None:
    histories = {"p": await parent(rig)}
    for index in range(6):
        mother = list(histories)[index // 2]
        child, length = f"c{index}", len(histories[mother]) - index
        epoch = rig.sessions.epoch(mother)
        assert epoch is not None
        await rig.host.fork(mother, epoch, ForkOrder(child, child, length))
        histories[child] = histories[mother][:length]
        assert await say(rig, child, histories[child], [index + 1]) in (length, length - 1)
    for session_id in ("p", "c3", "c0", "c5", "c1"):
        await rig.host.close(session_id, 1)
        del histories[session_id]
        for other, history in histories.items():
            await say(rig, other, history, [5])
    for session_id in histories:
        await rig.host.close(session_id, 1)
    await rig.books_are_empty()


async def test_many_forks_share_the_pages_of_a_long_prefix(rig: Rig) -> None:
    await parent(rig, 400)
    before = await rig.pages()
    for index in range(16):
        await rig.host.fork("p", 1, ForkOrder(f"c{index}", f"k{index}"))
    # Each child has one copied page, which is partly full. 16 copies of the prefix would take 1,600 pages.
    assert 0 < before.free - (await rig.pages()).free <= 16


async def test_a_fork_during_a_turn_is_refused_and_a_turn_waits_for_a_fork(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await parent(rig)
    rig.runner.hold()
    turn = asyncio.create_task(rig.run(call([1], "p", max_new_tokens=30), 1))
    await rig.begun()
    with pytest.raises(TurnInFlight):
        await rig.host.fork("p", 1, ForkOrder("c", "k"))
    rig.runner.go_on()
    history += [1, *tokens_of(await turn)]
    rig.controller.gate.clear()
    forking = asyncio.create_task(rig.host.fork("p", 1, ForkOrder("c", "k")))
    await rig.in_turn("p")
    with monkeypatch.context() as patch:
        patch.setattr(overlaps, "OVERLAP_PATIENCE_S", 0.05)
        refused = (await rig.run(call([2], "p"), 1))[-1].error
    assert refused is not None
    assert (refused.status, refused.code) == (409, "turn_in_flight"), "the log does not answer"
    waiting = asyncio.create_task(say(rig, "p", history, [3]))
    for _ in range(50):
        await asyncio.sleep(0)
    num_tokens = len(history)
    rig.controller.gate.set()
    assert (await forking).tokens == num_tokens
    await waiting


async def test_a_turn_of_the_child_waits_for_the_fork(rig: Rig) -> None:
    history = await parent(rig)
    rig.controller.gate.clear()
    forking = asyncio.create_task(rig.host.fork("p", 1, ForkOrder("c", "k")))
    await rig.in_turn("p")
    turn = asyncio.create_task(rig.run(call([7], "c"), 1))
    again = asyncio.create_task(rig.host.fork("p", 1, ForkOrder("c", "other")))
    await asyncio.sleep(0.02)
    rig.controller.gate.set()
    await forking
    assert tokens_of(await turn) == null_generate([*history, 7], 8, VOCAB_SIZE)
    with pytest.raises(SessionExists):
        await again


async def test_closing_the_parent_during_the_fork_ends_it_afterwards(rig: Rig) -> None:
    history = await parent(rig)
    rig.controller.gate.clear()
    forking = asyncio.create_task(rig.host.fork("p", 1, ForkOrder("c", "k")))
    await rig.in_turn("p")
    closing = asyncio.create_task(rig.host.close("p", 1))
    await asyncio.sleep(0)
    rig.controller.gate.set()
    await forking
    assert await closing
    assert [entry.session_id for entry in rig.controller.cluster.sessions()] == ["c"]
    await say(rig, "c", history, [7])
    await rig.host.close("c", 1)
    await rig.books_are_empty()


async def test_whoever_asked_may_go_away(rig: Rig) -> None:
    history = await parent(rig)
    rig.controller.gate.clear()
    forking = asyncio.create_task(rig.host.fork("p", 1, ForkOrder("c", "k")))
    await rig.in_turn("p")
    forking.cancel()
    await asyncio.wait([forking])
    rig.controller.gate.set()
    await rig.settled()
    await say(rig, "c", list(history), [7])
    await say(rig, "p", history, [8])


async def test_a_log_that_fails_makes_no_child(rig: Rig) -> None:
    history = await parent(rig)
    rig.controller.failures["fork_session"] = [StoreError("disk full")]
    with pytest.raises(StoreError):
        await rig.host.fork("p", 1, ForkOrder("c", "k"))
    assert rig.sessions.epoch("c") is None
    assert [entry.session_id for entry in rig.controller.cluster.sessions()] == ["p"]
    await say(rig, "p", history, [8])


async def test_a_lost_answer_is_found_by_the_repetition(rig: Rig) -> None:
    history = await parent(rig)
    rig.controller.lost_replies["fork_session"] = [StoreError("no reply in time")]
    order = ForkOrder("c", "k", 20)
    with pytest.raises(StoreError):
        await rig.host.fork("p", 1, order)
    first = await rig.host.fork("p", 1, order)
    again = await rig.host.fork("p", 1, order)
    assert first == again
    assert (first.tokens, first.cached_tokens) in ((20, 20), (20, 19))
    with pytest.raises(SessionExists):
        await rig.host.fork("p", 1, ForkOrder("c", "another"))
    await say(rig, "c", history[:20], [7])


async def test_an_engine_that_cannot_share_costs_time_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    history = await parent(rig)

    def refuse(*_: Any) -> Any:
        raise EngineError("no")

    monkeypatch.setattr(rig.engine, "fork_session", refuse)
    assert (await rig.host.fork("p", 1, ForkOrder("c", "k"))).cached_tokens == 0
    await say(rig, "c", history, [7])


async def test_a_replica_that_dies_midway_leaves_the_child_in_the_log(rig: Rig) -> None:
    """The log has the child and the replica is gone. The next owner still gets the whole history."""
    history = await parent(rig)
    cluster = rig.controller.cluster
    cluster.fork_session("p", 1, REPLICA_ID, ForkOrder("c", "k", 30))
    cluster.report_unreachable(REPLICA_ID, True)
    cluster.register_replica(ReplicaStatus("replica-b", 1000, 1000))
    moved = cluster.resolve("c", False, "")
    assert (moved.replica_id, moved.epoch) == ("replica-b", 2)
    record = cluster.load_session("c", moved.epoch, "replica-b")
    assert unpack_tokens(record.history).tolist() == history[:30]


# Over HTTP


async def turn(client: httpx.AsyncClient, session_id: str, tokens: list[int], **headers: str) -> Any:
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
    reply = await client.post(
        "/generate", json={**body, "session_params": {"id": session_id}}, headers=headers
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def opened(client: httpx.AsyncClient, session_id: str, **headers: str) -> list[int]:
    body = {"capacity_of_str_len": 1, "streaming": True, "session_id": session_id}
    assert (await client.post("/open_session", json=body, headers=headers)).status_code == 200
    return [1, 2, 3, *(await turn(client, session_id, [1, 2, 3], **headers))["output_ids"]]


async def fork(
    client: httpx.AsyncClient, session_id: str, headers: Any = None, **body: Any
) -> httpx.Response:
    return await client.post(f"/v1/kedge/sessions/{session_id}/fork", json=body, headers=headers)


async def test_fork_call(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        history = await opened(client, "team/p")
        reply = await fork(client, "team/p", new_session_id="c", length=5, timeout_s=50)
        assert reply.status_code == 200
        assert reply.json() in [
            {"session_id": "c", "tokens": 5, "cached_tokens": cached} for cached in (4, 5)
        ]
        assert service.cluster.session("c").timeout_s == 50
        named = (await fork(client, "c")).json()
        assert named["tokens"] == 5
        for session_id in ("c", named["session_id"]):
            reply = await turn(client, session_id, [9])
            assert reply["output_ids"] == null_generate([*history[:5], 9], 6, VOCAB_SIZE)
            assert reply["meta_info"]["cached_tokens"] in (4, 5)
        for session_id in ("team/p", "c", named["session_id"]):
            assert (await client.delete(f"/v1/kedge/sessions/{session_id}")).status_code == 204
        await service.rig.books_are_empty()


async def test_refused_forks_name_the_field(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        await opened(client, "p")
        for session_id, body, status, code, param in (
            ("x", {}, 404, "session_not_found", "session_id"),
            ("p", {"length": 10}, 400, "invalid_fork", "length"),
            ("p", {"new_session_id": "p"}, 400, "session_exists", "new_session_id"),
            ("p", {"length": -1}, 400, "invalid_request", "length"),
            ("p", {"new_session_id": "a b"}, 400, "invalid_request", "new_session_id"),
            ("p", {"timeout_s": 0}, 400, "invalid_request", "timeout_s"),
            ("p", {"at": 3}, 400, "unknown_field", "at"),
        ):
            reply = await fork(client, session_id, **body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
        rig = service.rig
        rig.runner.hold()
        running = asyncio.create_task(rig.run(call([1], "p", max_new_tokens=30), 1))
        await rig.begun()
        assert (await fork(client, "p")).status_code == 409
        rig.runner.go_on()
        await running
        assert [entry.session_id for entry in service.cluster.sessions()] == ["p"]


async def test_tenants_see_only_their_own(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        acme = {"x-tenant-id": "acme"}
        await opened(client, "p", **acme)
        assert service.calls[0].tenant == "acme"
        assert (await fork(client, "p")).status_code == 404
        assert (await fork(client, "p", {"x-tenant-id": "other"})).status_code == 404
        assert (await client.delete("/v1/kedge/sessions/p")).status_code == 404
        assert (await fork(client, "p", acme, new_session_id="c")).status_code == 200
        assert {entry.tenant for entry in service.cluster.sessions()} == {"acme"}
        assert (await client.delete("/v1/kedge/sessions/c", headers=acme)).status_code == 204
        bad = await client.post("/v1/completions", json={"prompt": [1]}, headers={"x-tenant-id": "a b"})
        assert bad.json()["error"]["param"] == "x-tenant-id"
        for path in ("/v1/completions", "/v1/chat/completions"):
            message = (
                {"prompt": [1]} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
            )
            assert (
                await client.post(path, json={**message, "max_tokens": 2}, headers=acme)
            ).status_code == 200
            assert service.calls[-1].tenant == "acme"


async def test_audit_call(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, _):
        await opened(client, "p")
        reply = await client.get("/v1/kedge/audit")
        assert (reply.status_code, reply.json()["clean"], reply.json()["error"]) == (200, True, None)
        (found,) = reply.json()["replicas"]
        assert (found["replica_id"], found["clean"], found["error"]) == (REPLICA_ID, True, None)
        full = found["pools"]["full"]
        assert full["leaked"] == 0
        assert full["total"] == sum(count for account, count in full.items() if account != "total")
        assert full["free"] < full["total"]
        assert set(found["host"]) == set(found["disk"]) == {"budget_bytes", "used_bytes", "sessions"}
        assert (found["findings"], found["mismatches"]) == ([], [])
