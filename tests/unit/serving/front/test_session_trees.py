"""Sessions that were opened without `streaming` are trees of requests, as with SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from serving.front.api.turn_headers import REPLAYED
from serving.wire.tree_ids import node_id
from serving.wire.turns import SessionInfo, TurnCall, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.front.test_session_api import GREEDY, generate, refused
from tests.unit.serving.local_service import LocalService
from tests.unit.serving.replica_rig import VOCAB_SIZE

MOST = int(GREEDY["max_new_tokens"])


async def open_tree(client: httpx.AsyncClient) -> str:
    reply = await client.post("/open_session", json={"capacity_of_str_len": 1000})
    assert reply.status_code == 200, reply.text
    tree: str = reply.json()
    return tree


class Tree:
    """Requests of a tree. Each is checked to be answered like a fresh request with all of its input."""

    def __init__(self, client: httpx.AsyncClient, session_id: str) -> None:
        self.client = client
        self.session_id = session_id
        self.inputs: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}

    def all_of(self, rid: str) -> list[int]:
        return self.inputs[rid] + self.outputs[rid]

    async def ask(self, rid: str, new: list[int], kept: list[int], /, **params: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await generate(
            self.client, input_ids=new, rid=rid, session_params={"id": self.session_id, **params}
        )
        self.inputs[rid], self.outputs[rid] = kept + new, reply["output_ids"]
        assert reply["output_ids"] == null_generate(self.inputs[rid], MOST, VOCAB_SIZE)
        meta: dict[str, Any] = reply["meta_info"]
        assert (meta["id"], meta["prompt_tokens"]) == (rid, len(self.inputs[rid]))
        return meta

    async def refuse(self, field: str, **params: Any) -> str:
        error = await refused(
            self.client, "/generate", input_ids=[1], session_params={"id": self.session_id, **params}
        )
        assert error["param"] == f"session_params.{field}", error
        return str(error["message"])


async def test_a_request_goes_on_from_the_one_it_names(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    first = await tree.ask("b", [4, 5], tree.all_of("a"), rid="a")
    assert first["cached_tokens"] >= len(tree.all_of("a")) - 1
    await tree.ask("c", [6], tree.all_of("a"), rid="a")
    await tree.ask("d", [7], tree.all_of("b"), rid="b")
    # Without a request to go on from, it begins anew.
    await tree.ask("e", [8, 9], [])
    await tree.ask("f", [8], tree.inputs["b"], rid="b", drop_previous_output=True)
    await tree.ask("g", [8], tree.all_of("d")[:4], rid="d", offset=4)
    assert (await client.post("/close_session", json={"session_id": tree.session_id})).status_code == 200
    assert (await client.get("/v1/kedge/sessions")).json()["sessions"] == []
    await service.rig.books_are_empty()


async def test_an_offset_counts_from_the_end_or_within_the_input(client: httpx.AsyncClient) -> None:
    """SGLang treats an offset as Python's slices do, and its own tests send -1. This used to be refused. With
    `drop_previous_output` the answer used to be kept up to the offset."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [], offset=-1, replace=True)
    await tree.ask("b", [4], tree.all_of("a")[:-1], rid="a", offset=-1, replace=True)
    await tree.ask("c", [5], [], rid="a", offset=-99)
    dropped: dict[str, Any] = {"rid": "a", "drop_previous_output": True}
    await tree.ask("d", [6], [1, 2], **dropped, offset=2)
    await tree.ask("e", [7], [1, 2, 3], **dropped, offset=5)
    await tree.ask("f", [8], [1, 2], **dropped, offset=-1)


async def test_several_go_on_from_the_same_one_at_once(client: httpx.AsyncClient) -> None:
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    known = tree.all_of("a")
    await asyncio.gather(*(tree.ask(f"b{n}", [10 + n, n], known, rid="a") for n in range(8)))


@pytest.mark.parametrize("rid", ["nobody", "a\x1fb", "\u00e4"])
async def test_a_request_that_nobody_made_is_not_gone_on_from(client: httpx.AsyncClient, rid: str) -> None:
    """The request used to get 200 and was appended."""
    tree = Tree(client, await open_tree(client))
    assert "Invalid request session id" in await tree.refuse("rid", rid=rid)
    await tree.ask("a", [1, 2, 3], [])
    assert "Invalid request session id" in await tree.refuse("rid", rid=rid)
    assert "history has 9 tokens" in await tree.refuse("offset", rid="a", offset=10)


async def test_one_that_has_not_finished_is_not_gone_on_from(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    tree = Tree(client, await open_tree(client))
    service.rig.runner.hold()
    running = asyncio.create_task(tree.ask("a", [1, 2, 3], []))
    await service.rig.runner.held()
    assert "no finished request" in await tree.refuse("rid", rid="a")
    service.rig.runner.go_on()
    await running
    await tree.ask("b", [4], tree.all_of("a"), rid="a")


async def test_replacing_drops_what_went_on(client: httpx.AsyncClient) -> None:
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await tree.ask("b", [4], tree.all_of("a"), rid="a")
    await tree.ask("c", [5], tree.all_of("b"), rid="b")
    await tree.ask("other", [5], [])
    await tree.ask("d", [6], tree.all_of("a"), rid="a", replace=True)
    for gone in ("b", "c"):
        await tree.refuse("rid", rid=gone)
    await tree.ask("e", [7], tree.all_of("d"), rid="d")
    await tree.ask("f", [7], tree.all_of("other"), rid="other")
    await tree.ask("anew", [8], [], replace=True)
    for gone in ("a", "d", "other"):
        await tree.refuse("rid", rid=gone)


async def test_a_name_is_taken_once_and_an_aborted_one_is_free(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    again = {"input_ids": [1], "rid": "a", "session_params": {"id": tree.session_id}}
    assert (await refused(client, "/generate", **again))["param"] == "rid"
    service.rig.runner.hold()
    running = asyncio.create_task(generate(client, **again | {"rid": "b"}))
    await service.rig.runner.held()
    await client.post("/abort_request", json={"rid": "b"})
    service.rig.runner.go_on()
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    await tree.refuse("rid", rid="b")
    await tree.ask("b", [4], tree.all_of("a"), rid="a")


async def test_a_request_with_a_key_is_answered_again(client: httpx.AsyncClient) -> None:
    tree = await open_tree(client)
    body = {"input_ids": [1, 2], "rid": "a", "sampling_params": GREEDY, "session_params": {"id": tree}}
    once, again = [
        await client.post("/generate", json=body, headers={"idempotency-key": "k"}) for _ in range(2)
    ]
    assert again.status_code == 200, again.text
    assert once.json()["output_ids"] == again.json()["output_ids"]
    other = await client.post("/generate", json=body, headers={"idempotency-key": "l"})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "turn_differs")


@pytest.mark.parametrize("begins_anew", [False, True])
async def test_a_replacing_request_with_a_key_runs_once_and_keeps_what_went_on_from_it(
    client: httpx.AsyncClient, begins_anew: bool
) -> None:
    """Sent again, it used to drop its own answer with all that had gone on from it, and to run once more."""
    tree = await tree_of_two(client)
    params = {"id": tree.session_id, "replace": True} | ({} if begins_anew else {"rid": "a"})
    body = {"input_ids": [5], "rid": "b", "session_params": params, "sampling_params": GREEDY}
    key = {"idempotency-key": "k"}
    once = (await client.post("/generate", json=body, headers=key)).json()
    await tree.refuse("rid", rid="old")
    tree.inputs["b"] = [5] if begins_anew else [*tree.all_of("a"), 5]
    tree.outputs["b"] = once["output_ids"]
    await tree.ask("c", [6], tree.all_of("b"), rid="b")
    again = await client.post("/generate", json=body, headers=key)
    assert again.status_code == 200, again.text
    assert again.headers[REPLAYED] == "true"
    assert again.json()["output_ids"] == once["output_ids"]
    other_key = await client.post("/generate", json=body, headers={"idempotency-key": "l"})
    assert other_key.json()["error"]["code"] == "turn_differs"
    assert (await client.post("/generate", json=body)).json()["error"]["param"] == "rid"
    await tree.ask("d", [7], tree.all_of("c"), rid="c")


@pytest.mark.parametrize("rid", [None, "a"])
async def test_a_replacing_request_that_comes_to_nothing_drops_nothing(
    client: httpx.AsyncClient, service: LocalService, rid: str | None
) -> None:
    """It used to drop the others before anything looked whether it could be run."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await tree.ask("b", [4], tree.all_of("a"), rid="a")
    params = {"id": tree.session_id, "rid": rid, "replace": True}
    for refused_as, body in (("long", {"input_ids": [1] * 600}), ("b", {"input_ids": [1]})):
        await refused(client, "/generate", **body, rid=refused_as, session_params=params)
    service.rig.runner.hold()
    running = asyncio.create_task(generate(client, input_ids=[1], rid="aborted", session_params=params))
    await service.rig.runner.held()
    await client.post("/abort_request", json={"rid": "aborted"})
    service.rig.runner.go_on()
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    await tree.ask("c", [5], tree.all_of("b"), rid="b")


async def tree_of_two(client: httpx.AsyncClient) -> Tree:
    """A tree whose request "old" went on from "a"."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await tree.ask("old", [4], tree.all_of("a"), rid="a")
    return tree


class Gates:
    """Requests that have begun, and whose turns wait until they are let in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: LocalService, *rids: str) -> None:
        self._run = service.run
        self._arrived = {rid: asyncio.Event() for rid in rids}
        self._open = {rid: asyncio.Event() for rid in rids}
        monkeypatch.setattr(service, "run", self._wait_and_run)

    @asynccontextmanager
    async def _wait_and_run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        if call.request_id in self._open:
            self._arrived[call.request_id].set()
            await self._open[call.request_id].wait()
        async with self._run(call) as events:
            yield events

    async def arrived(self, rid: str) -> None:
        async with asyncio.timeout(20):
            await self._arrived[rid].wait()

    def let_in(self, rid: str) -> None:
        self._open[rid].set()


async def test_of_two_that_replace_each_other_the_later_one_stays(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = await tree_of_two(client)
    gates = Gates(monkeypatch, service, "b", "c")
    asked = {}
    for rid in ("b", "c"):
        asking = tree.ask(rid, [5], tree.all_of("a"), rid="a", replace=True)
        asked[rid] = asyncio.create_task(asking)
        await gates.arrived(rid)
    for rid in ("b", "c"):
        gates.let_in(rid)
        await asked[rid]
    for gone in ("old", "b"):
        await tree.refuse("rid", rid=gone)
    await tree.ask("d", [7], tree.all_of("c"), rid="c")


async def test_what_goes_on_meanwhile_from_one_that_is_replaced_goes_with_it(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = await tree_of_two(client)
    gates = Gates(monkeypatch, service, "b")
    replacing = asyncio.create_task(tree.ask("b", [5], tree.all_of("a"), rid="a", replace=True))
    await gates.arrived("b")
    await tree.ask("behind", [6], tree.all_of("old"), rid="old")
    await tree.ask("beside", [7], tree.all_of("a"), rid="a")
    gates.let_in("b")
    await replacing
    for gone in ("old", "behind"):
        await tree.refuse("rid", rid=gone)
    for rid in ("b", "beside"):
        await tree.ask(f"{rid}-2", [8], tree.all_of(rid), rid=rid)


async def test_a_client_that_leaves_at_the_end_leaves_nothing_of_what_was_replaced(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is committed, so what it replaces is dropped all the same."""
    tree = await tree_of_two(client)
    close, closing = service.close_session, asyncio.Event()

    async def first_one_hangs(session_id: str, *, tenant: str) -> bool:
        if closing.is_set():
            return await close(session_id, tenant=tenant)
        closing.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(service, "close_session", first_one_hangs)
    replacing = asyncio.create_task(tree.ask("b", [5], tree.all_of("a"), rid="a", replace=True))
    async with asyncio.timeout(20):
        await closing.wait()
        replacing.cancel()
        await asyncio.wait([replacing])
    assert [each["rid"] for each in await sessions(client)] == [None, "a", "b"]


async def test_a_tree_takes_no_turns_of_chats(client: httpx.AsyncClient) -> None:
    tree = await open_tree(client)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    reply = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": tree})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_is_tree")


async def test_trees_of_tenants_are_apart(client: httpx.AsyncClient) -> None:
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    theirs = {"x-tenant-id": "other"}
    opening = {"capacity_of_str_len": 1, "session_id": tree.session_id}
    assert (await client.post("/open_session", json=opening, headers=theirs)).status_code == 200
    body = {"input_ids": [1], "session_params": {"id": tree.session_id, "rid": "a"}}
    assert (await client.post("/generate", json=body, headers=theirs)).status_code == 400
    closed = await client.post("/close_session", json={"session_id": tree.session_id}, headers=theirs)
    assert closed.status_code == 200
    await tree.ask("b", [4], tree.all_of("a"), rid="a")


async def test_a_request_that_comes_to_nothing_leaves_nothing(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    """Each such request used to leave a session, which counted for its tenant and held KV until it timed out."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    known = [(tree.session_id, None), (tree.session_id, "a")]
    params = {"id": tree.session_id, "rid": "a"}
    await refused(client, "/generate", input_ids=[1] * 600, rid="long", session_params=params)
    for rid, stream in (("aborted", False), ("streamed", True), ("left", False)):
        body = {"input_ids": [1], "rid": rid, "stream": stream, "session_params": params}
        service.rig.runner.hold()
        running = asyncio.create_task(client.post("/generate", json=body))
        await service.rig.runner.held()
        if rid == "left":
            running.cancel()
        else:
            await client.post("/abort_request", json={"rid": rid})
        service.rig.runner.go_on()
        await asyncio.wait([running])
    async with asyncio.timeout(20):
        while [(each["session_id"], each["rid"]) for each in await sessions(client)] != known:
            await asyncio.sleep(0.01)


async def test_requests_are_listed_by_the_names_of_their_client(client: httpx.AsyncClient) -> None:
    """Requests used to be listed under ids that no client had given, with a character that no client may send."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await tree.ask("b", [4], tree.all_of("a"), rid="a")
    pages = []
    after: dict[str, str] = {}
    while True:
        page = (await client.get("/v1/kedge/sessions", params={"limit": 1, **after})).json()
        pages += [(each["session_id"], each["rid"]) for each in page["sessions"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert pages == [(tree.session_id, rid) for rid in (None, "a", "b")]
    path = f"/v1/kedge/sessions/{tree.session_id}"
    assert (await client.get(path)).json()["rid"] is None
    one = (await client.get(path, params={"rid": "b", "messages": "true"})).json()
    assert (one["session_id"], one["rid"]) == (tree.session_id, "b")
    assert one["tokens"] == len(tree.all_of("b"))
    assert (await client.get(path, params={"rid": "c"})).status_code == 404
    for raw in (client.get(f"{path}%1Fb"), client.delete(f"{path}%1Fb")):
        assert (await raw).status_code == 404
    await tree.ask("c", [5], tree.all_of("b"), rid="b")


async def sessions(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get("/v1/kedge/sessions")).json()["sessions"]
    return listed


async def test_a_request_that_the_ledger_knows_nothing_of_yet_keeps_its_session(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger hears of a turn in flight with a heartbeat. Until then another request of the same name used to close
    the session."""
    tree = Tree(client, await open_tree(client))
    session = service.session

    async def not_yet_told(session_id: str, *, tenant: str) -> SessionInfo | None:
        found = await session(session_id, tenant=tenant)
        return None if found is None else replace(found, in_turn=False)

    monkeypatch.setattr(service, "session", not_yet_told)
    service.rig.runner.hold()
    running = asyncio.create_task(tree.ask("a", [1, 2, 3], []))
    await service.rig.runner.held()
    again = {"input_ids": [1], "rid": "a", "session_params": {"id": tree.session_id}}
    async with asyncio.timeout(20):
        assert (await refused(client, "/generate", **again))["param"] == "rid"
    service.rig.runner.go_on()
    await running
    await tree.ask("b", [4], tree.all_of("a"), rid="a")


async def test_what_a_front_end_has_left_is_free(client: httpx.AsyncClient, service: LocalService) -> None:
    """The front end forked the session and ended before it ran the request."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await service.fork_session(
        node_id(tree.session_id, "a"), node_id(tree.session_id, "b"), length=2, timeout_s=None, tenant=""
    )
    await tree.ask("b", [4], tree.all_of("a"), rid="a")
    await tree.ask("c", [5], tree.all_of("b"), rid="b")


@pytest.mark.parametrize("kept", [{}, {"drop_previous_output": True}])
async def test_replacing_drops_what_is_still_going_on(
    client: httpx.AsyncClient, service: LocalService, kept: dict[str, Any]
) -> None:
    """The parent of a request used to be read from the request's turn, which does not exist while it is in flight."""
    tree = Tree(client, await open_tree(client))
    await tree.ask("a", [1, 2, 3], [])
    await tree.ask("other", [5], [])
    service.rig.runner.hold()
    known = tree.inputs["a"] if kept else tree.all_of("a")
    running = asyncio.create_task(tree.ask("b", [4], known, rid="a", **kept))
    await service.rig.runner.held()
    replacing = asyncio.create_task(tree.ask("c", [6], tree.all_of("a"), rid="a", replace=True))
    async with asyncio.timeout(20):
        while len(await sessions(client)) < 5:
            await asyncio.sleep(0.01)
    service.rig.runner.go_on()
    await asyncio.gather(running, replacing)
    await tree.refuse("rid", rid="b")
    await tree.ask("d", [7], tree.all_of("c"), rid="c")
    await tree.ask("e", [7], tree.all_of("other"), rid="other")
