"""`priority` is refused by name or orders the waiting turns. With vLLM lower numbers go first, with SGLang higher
ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api.rules import ApiRules
from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, client_of, small_text
from tests.unit.serving.replica_rig import running_rig

MAX_TOKENS = 3
WAIT_S = 60.0
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": MAX_TOKENS},
    "/v1/completions": {"prompt": "hi", "max_tokens": MAX_TOKENS},
    "/v1/responses": {"input": "hi", "max_output_tokens": MAX_TOKENS, "store": False},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": MAX_TOKENS}},
}
every_protocol = pytest.mark.parametrize("path", BODIES)


@asynccontextmanager
async def one_at_a_time(directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    """A service on a replica that runs one request at a time. Clients may give priorities."""
    async with running_rig(directory, text=small_text(), max_running=1) as rig:
        service = LocalService(rig)
        app = create_http_app(service, rules=ApiRules(request_priority=True))
        async with client_of(app) as client:
            yield client, service


async def order_of(
    client: httpx.AsyncClient, service: LocalService, path: str, bodies: list[dict[str, Any]]
) -> list[int]:
    """The order in which the requests were answered. All of them waited behind a running one."""
    done: list[int] = []

    async def ask(index: int) -> None:
        headers = {"x-session-id": f"s{index}"} if path == "/v1/chat/completions" else {}
        reply = await client.post(path, json=bodies[index], headers=headers)
        assert reply.status_code == 200, reply.text
        done.append(index)

    runner = service.rig.runner
    runner.hold()
    async with asyncio.TaskGroup() as group:
        group.create_task(client.post("/v1/completions", json=BODIES["/v1/completions"]))
        await runner.held()
        for index in range(len(bodies)):
            group.create_task(ask(index))
            await service.rig.begun(index + 2)
        runner.go_on()
    return done


@every_protocol
async def test_the_more_urgent_of_those_that_wait_goes_first(tmp_path: Path, path: str) -> None:
    sign = 1 if path == "/generate" else -1
    async with one_at_a_time(tmp_path) as (client, service):
        bodies = [BODIES[path] | {"priority": sign * urgency} for urgency in (-5, 0, 7, 1000, 7)]
        assert await order_of(client, service, path, bodies) == [3, 2, 4, 1, 0]
        assert (await client.get("/v1/kedge/audit")).json()["clean"]


async def test_both_ways_to_say_it_are_one_order(tmp_path: Path) -> None:
    """A turn without a priority comes after turns with a higher and before turns with a lower one."""
    async with one_at_a_time(tmp_path) as (client, service):
        calls = [
            ("/v1/completions", {"priority": 3}),
            ("/generate", {"priority": 5}),
            ("/v1/completions", {}),
        ]
        done: list[int] = []

        async def ask(index: int, path: str, more: dict[str, Any]) -> None:
            assert (await client.post(path, json=BODIES[path] | more)).status_code == 200
            done.append(index)

        runner = service.rig.runner
        runner.hold()
        async with asyncio.TaskGroup() as group:
            group.create_task(client.post("/generate", json=BODIES["/generate"]))
            await runner.held()
            for index, (path, more) in enumerate(calls):
                group.create_task(ask(index, path, more))
                await service.rig.begun(index + 2)
            runner.go_on()
        assert done == [1, 2, 0]


@every_protocol
async def test_only_zero_is_taken_where_the_operator_has_not_said_so(
    client: httpx.AsyncClient, service: LocalService, path: str
) -> None:
    for priority in (1, -1):
        reply = await client.post(path, json=BODIES[path] | {"priority": priority})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("priority", "unsupported_field")
        assert "api.request_priority" in error["message"]
    assert service.calls == []
    for priority in (0, None):
        reply = await client.post(path, json=BODIES[path] | {"priority": priority})
        assert reply.status_code == 200, reply.text


@every_protocol
async def test_another_priority_is_named(tmp_path: Path, path: str) -> None:
    async with one_at_a_time(tmp_path) as (client, service):
        for priority in (1001, -1001, 1.5, "1", True, [1]):
            reply = await client.post(path, json=BODIES[path] | {"priority": priority})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "priority"
        assert service.calls == []


async def test_urgent_turns_take_nothing_from_the_turn_that_runs(tmp_path: Path) -> None:
    """The pool is too small for all sessions' turns at a time. All turns are committed, whatever overtakes them."""
    async with running_rig(tmp_path, text=small_text(), num_pages=48) as rig:
        service = LocalService(rig)
        app = create_http_app(service, rules=ApiRules(request_priority=True))
        async with client_of(app) as client:

            async def talk(round_number: int, index: int) -> list[int]:
                counts = []
                for turn in range(3):
                    body = {
                        "messages": [{"role": "user", "content": f"{index} {turn} " * 6}], "max_tokens": 20,
                        "ignore_eos": True, "priority": (index * 7 + turn) % 5 - 2,
                    }  # fmt: skip
                    reply = await client.post(
                        "/v1/chat/completions",
                        json=body,
                        headers={"x-session-id": f"s{round_number}-{index}"},
                    )
                    assert reply.status_code == 200, reply.text
                    counts.append(reply.json()["usage"]["completion_tokens"])
                return counts

            num_rounds = 0
            async with asyncio.timeout(WAIT_S):  # until turns are so close that one is retracted
                while not rig.engine.stats().retractions:
                    talks = (talk(num_rounds, index) for index in range(8))
                    assert await asyncio.gather(*talks) == [[20, 20, 20]] * 8
                    num_rounds += 1
            turns = (await client.get("/v1/kedge/sessions")).json()["sessions"]
            assert [session["turns"] for session in turns] == [3] * (8 * num_rounds)
            assert (await client.get("/v1/kedge/audit")).json()["clean"]
            for session in turns:
                await client.delete(f"/v1/kedge/sessions/{session['session_id']}")
            await rig.books_are_empty()
