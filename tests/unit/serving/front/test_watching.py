"""GET /v1/kedge/watch: the state of the cluster and its events, for many watchers by one reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from controllers.errors import NoAnswer
from controllers.records import ClusterEvent, ClusterView
from controllers.session_keys import session_key
from serving.background import BackgroundTasks
from serving.front import cluster_watch
from serving.front.cluster_watch import MOST_TOLD_FIRST, MOST_UNREAD, SharedWatch, Watcher
from serving.front.http import create_http_app
from serving.front.watch_source import ClusterSource
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from serving.watch.audit_reply import failed_audit
from serving.watch.cluster_state import Look, audit_findings, told_event
from serving.wire.controller_calls import ControllerCalls
from serving.wire.tree_ids import node_id
from serving.wire.turns import ModelInfo, ServiceError
from tests.unit.serving.local_service import MODEL, LocalService, http_server, local_service
from tests.unit.serving.replica_rig import REPLICA_ID, WAIT_S, local_controller
from tests.unit.serving.sdk_clients import http_at

WATCH = "/v1/kedge/watch"
RING = KeyRing({API_KEYS: "key-a=acme", OPERATOR_KEYS: "key-o"})
PAGES = {"total": 9, "free": 9, "cached": 0, "protected": 0, "session": 0, "in_flight": 0, "leaked": 0}


def figures(replica_id: str, **changed: Any) -> dict[str, Any]:
    """The part of a replica's answer to Describe that the watch reads."""
    tier = {"budget_bytes": 0, "used_bytes": 0, "sessions": 0}
    counters = (
        *("demotions_to_host", "demotions_to_disk", "demotions_to_log"),
        *("promotions_from_host", "promotions_from_disk"),
        *("running", "waiting", "sessions", "generated_tokens", "prefill_tokens", "cached_tokens", "steps"),
    )
    return {
        "replica_id": replica_id,
        "pages": PAGES,
        "window_pages": None,
        "page_size": 4,
        "page_size_bytes": 64,
        "window_page_size_bytes": 0,
        "host": tier,
        "disk": tier,
        **dict.fromkeys(counters, 0),
        **changed,
    }


class ScriptedSource:
    """Gives what a test sets. It gives each of `events` once."""

    def __init__(self) -> None:
        self.replicas = [figures("a")]
        self.events: list[ClusterEvent] = []
        self.audits = 0
        self.looks = 0
        self.audit: dict[str, Any] | None = None

    def happen(self, *kinds: str) -> None:
        self.events += [ClusterEvent(0, 5.0, kind, "t s", "a") for kind in kinds]

    async def look(self, cursor: str | None, limit: int) -> Look:
        del cursor, limit
        self.looks += 1
        events, self.events = tuple(self.events), []
        return Look(6.0, ClusterView(0, (), {"a": "up"}, events, str(self.looks)), self.replicas)

    async def audit_of(self, replica_id: str) -> Mapping[str, Any] | None:
        assert replica_id == "a"
        self.audits += 1
        return self.audit


@asynccontextmanager
async def watch_of(
    source: ScriptedSource, model: Callable[[], ModelInfo] = lambda: MODEL, **options: Any
) -> AsyncIterator[SharedWatch]:
    tasks = BackgroundTasks()
    try:
        yield SharedWatch(source, tasks, model, unix_clock=lambda: 7.0, **options)
    finally:
        await tasks.stop(1.0)


async def states_and_events(watcher: Any, until: str) -> tuple[list[Any], list[str]]:
    """The states and the kinds of the events, up to an event of kind `until`."""
    states, kinds = [], []
    async with asyncio.timeout(WAIT_S):
        async for items in watcher:
            states += [json.loads(each.data) for each in items if each.name == "state"]
            kinds += [json.loads(each.data)["kind"] for each in items if each.name == "event"]
            if until in kinds:
                break
    return states, kinds


async def test_one_reader_serves_all_and_runs_only_while_somebody_watches() -> None:
    source = ScriptedSource()
    async with watch_of(source) as watch:
        assert not watch.is_reading
        async with AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watch.watch(0.2, 10)) for _ in range(5)]
            source.happen("opened")
            for watcher in watchers:
                states, kinds = await states_and_events(watcher, "opened")
                assert kinds == ["opened"]
                assert states[0]["replicas"][0]["replica"] == "a"
            assert source.looks <= 2, "a look for each watcher"
        assert not watch.is_reading
        looks = source.looks
        await asyncio.sleep(0.5)  # waits: nothing signals that a look did not happen
        assert source.looks == looks


async def test_who_comes_later_hears_the_last_events_first() -> None:
    source = ScriptedSource()
    async with watch_of(source) as watch:
        source.happen(*["opened"] * (MOST_TOLD_FIRST + 50), "moved")
        async with watch.watch(0.2, 10) as first:
            assert len((await states_and_events(first, "moved"))[1]) == MOST_TOLD_FIRST
            async with watch.watch(60.0, 10) as second:
                states, kinds = await states_and_events(second, "moved")
                assert (len(states), len(kinds)) == (1, MOST_TOLD_FIRST)
                source.happen("closed")
                assert (await states_and_events(second, "closed")) == ([], ["closed"])


async def test_the_model_is_the_one_that_is_served_now() -> None:
    """After an update the former one was told, as long as the front end ran."""
    source, served = ScriptedSource(), replace(MODEL, model_id="former")
    async with watch_of(source, lambda: served) as watch, watch.watch(0.2, 10) as watcher:
        source.happen("opened")
        before, _ = await states_and_events(watcher, "opened")
        served = replace(MODEL, model_id="new")
        source.happen("closed")
        after, _ = await states_and_events(watcher, "closed")
    assert [states[-1]["model"] for states in (before, after)] == ["former", "new"]


async def test_a_look_that_fails_ends_nobodys_watch() -> None:
    source = ScriptedSource()
    async with watch_of(source) as watch:
        good, source.replicas = source.replicas, [{"replica_id": "a"}]
        async with watch.watch(0.2, 10) as watcher:
            async with asyncio.timeout(WAIT_S):
                while source.looks < 2:
                    await asyncio.sleep(0.01)
            source.replicas = good
            source.happen("opened")
            assert (await states_and_events(watcher, "opened"))[1] == ["opened"]


async def test_there_is_a_bound_of_watchers() -> None:
    async with watch_of(ScriptedSource(), most_watchers=2) as watch, watch.watch(1.0, 10):
        async with watch.watch(1.0, 10):
            with pytest.raises(ServiceError) as refused:
                async with watch.watch(1.0, 10):
                    raise AssertionError("admitted")
            assert (refused.value.info.status, refused.value.info.code) == (503, "too_many_watchers")
        async with watch.watch(1.0, 10):
            pass


async def test_a_slow_watcher_has_the_last_state_and_is_dropped_for_too_many_events() -> None:
    watcher = Watcher(0.2, 10, lambda: 0.0)
    for number in range(3):
        watcher.show(b"%d" % number)
    watcher.tell([b"e"] * MOST_UNREAD)
    items = await anext(watcher)
    assert [each.data for each in items if each.name == "state"] == [b"2"]
    assert len(items) == 1 + MOST_UNREAD
    for _ in range(3):
        watcher.tell([b"e"] * MOST_UNREAD)
    assert len(watcher._events) == MOST_UNREAD + 1, "they pile up"
    with pytest.raises(ServiceError) as dropped:
        await anext(watcher)
    assert dropped.value.info.code == "watcher_too_slow"


async def test_demotions_and_promotions_are_differences_of_counters() -> None:
    source = ScriptedSource()
    source.replicas = [figures("a", demotions_to_host=7)]
    async with watch_of(source) as watch, watch.watch(0.2, 10) as watcher:
        await anext(watcher)
        source.replicas = [figures("a", demotions_to_host=9, demotions_to_log=1, promotions_from_host=1)]
        told: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            async for items in watcher:
                told += [json.loads(each.data) for each in items if each.name == "event"]
                if len(told) == 2:
                    break
    assert [(each["kind"], each["replica"], each["detail"]) for each in told] == [
        ("demoted", "a", "2 to host memory, 1 to the log alone"),
        ("promoted", "a", "1 from host memory"),
    ]


LEAK = {
    "replica_id": "a",
    "findings": [
        {
            "kind": "leaked",
            "pool": "full",
            "page": 3,
            "accounts": [],
            "last": {"operation": "taken", "session": "t s", "request": "r", "age_s": 1.0},
        }
    ],
    "mismatches": [],
    "error": None,
}


async def test_a_leak_that_counters_show_is_looked_into_once_and_named() -> None:
    source = ScriptedSource()
    source.audit = LEAK
    source.replicas = [figures("a", pages=PAGES | {"free": 8, "leaked": 1})]
    async with watch_of(source) as watch, watch.watch(0.2, 10) as watcher:
        told: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while source.looks < 4:
                told += [json.loads(each.data) for each in await anext(watcher) if each.name == "event"]
    assert source.audits == 1
    (event,) = told
    assert (event["kind"], event["session"], event["tenant"], event["replica"]) == ("audit", "s", "t", "a")
    assert event["detail"] == ("page 3 of pool full is leaked: no account has it; last: taken, of request r")


def test_an_event_of_a_tree_s_request_names_both() -> None:
    """The id had a character between the two that no terminal shows."""
    key = session_key("t", node_id("tree", "r1"))
    opened = told_event(ClusterEvent(0, 5.0, "opened", key, "a"))
    (leaked,) = audit_findings(
        5.0,
        LEAK | {"findings": [LEAK["findings"][0] | {"last": LEAK["findings"][0]["last"] | {"session": key}}]},
    )
    for event in (opened, leaked):
        assert (event["tenant"], event["session"], event["rid"]) == ("t", "tree", "r1")
    assert told_event(ClusterEvent(0, 5.0, "opened", "s", "a"))["rid"] is None


async def test_an_audit_that_is_not_answered_is_made_again() -> None:
    """The page said that the events would tell which pages leak, and no event ever came."""
    source = ScriptedSource()
    source.replicas = [figures("a", pages=PAGES | {"free": 8, "leaked": 1})]
    async with watch_of(source) as watch, watch.watch(0.2, 10) as watcher, asyncio.timeout(WAIT_S):
        while source.audits < 1:
            await anext(watcher)
        source.audit = failed_audit("a", "the engine does not answer")
        while source.audits < 3:
            await anext(watcher)
        source.audit = LEAK
        told: list[Any] = []
        while not told:
            told += [json.loads(each.data) for each in await anext(watcher) if each.name == "event"]
    assert told[0]["kind"] == "audit"


def test_an_audit_with_many_findings_is_few_events() -> None:
    many = LEAK | {"findings": LEAK["findings"] * 500, "mismatches": ["full: 1 by counter, 2 by walk"]}
    told = audit_findings(5.0, many)
    assert len(told) == 22
    assert [each["detail"] for each in told[-2:]] == ["480 more pages", "full: 1 by counter, 2 by walk"]


async def told_over_http(
    client: httpx.AsyncClient, key: str = "key-o", **params: Any
) -> tuple[int, list[tuple[str, Any]]]:
    """The events of a stream, by name."""
    headers = {"authorization": f"Bearer {key}"}
    told = []
    async with client.stream("GET", WATCH, params=params, headers=headers, timeout=WAIT_S) as reply:
        text = (await reply.aread()).decode()
        if reply.status_code != 200:
            return reply.status_code, [("error", json.loads(text))]
        assert reply.headers["content-type"].startswith("text/event-stream")
        for block in text.split("\n\n"):
            if block and not block.startswith(":"):
                name, data = block.split("\n")
                told.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return reply.status_code, told


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[LocalService, httpx.AsyncClient]]:
    async with (
        local_service(tmp_path) as service,
        http_server(create_http_app(service, keys=RING)) as address,
        http_at(address) as client,
    ):
        yield service, client


async def test_the_stream_over_http(served: tuple[LocalService, httpx.AsyncClient]) -> None:
    _, client = served
    turn = {"model": MODEL.model_id, "prompt": [5, 6, 7, 8, 9], "max_tokens": 4}
    headers = {"authorization": "Bearer key-a", "x-session-id": "s"}
    assert (await client.post("/v1/completions", json=turn, headers=headers)).status_code == 200
    status, told = await told_over_http(client, count=2, interval_s=0.2)
    assert status == 200
    states = [data for name, data in told if name == "state"]
    assert len(states) == 2
    assert told[0][0] == "state"
    events = [(data["kind"], data["session"], data["tenant"]) for name, data in told if name == "event"]
    assert events == [("replica_up", None, ""), ("opened", "s", "acme")]
    (replica,) = states[1]["replicas"]
    pools = replica["pools"]["full"]
    assert (replica["replica"], replica["state"], replica["answers"]) == (REPLICA_ID, "up", True)
    assert pools["total"] == sum(count for account, count in pools.items() if account != "total")
    (row,) = states[1]["sessions"]["rows"]
    assert (row["session_id"], row["tenant"], row["turns"], row["tokens"]) == ("s", "acme", 1, 9)
    assert (row["tier"], row["kv_pages"]) == ("device", -(-row["kv_tokens"] // replica["page_tokens"]))
    assert set(row) == {
        *("session_id", "replica_id", "epoch", "tokens", "size_bytes", "turns", "idle_s", "in_turn"),
        *("tenant", "rid", "tier", "kv_tokens", "kv_pages"),
    }


async def test_only_operators_watch(served: tuple[LocalService, httpx.AsyncClient]) -> None:
    service, client = served
    status, ((_, body),) = await told_over_http(client, "key-a", count=1)
    assert (status, body["error"]["code"]) == (403, "operator_only")
    assert (await client.get(WATCH)).status_code == 401
    for params in ({"interval_s": 0.1}, {"interval_s": 61}, {"limit": 0}, {"count": 0}):
        status, ((_, body),) = await told_over_http(client, **params)
        assert (status, body["error"]["param"]) == (400, next(iter(params)))
    assert not service.is_watched


async def test_a_key_that_counts_no_more_watches_no_more(
    served: tuple[LocalService, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = served
    watching = asyncio.create_task(told_over_http(client, interval_s=0.2))
    async with asyncio.timeout(WAIT_S):
        while not served[0].is_watched:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(RING, "_callers", {b"": next(iter(RING._callers.values()))})
    _, told = await watching
    assert told[-1][0] == "error"
    assert told[-1][1]["error"]["code"] == "operator_only"


async def test_a_client_that_leaves_ends_its_watch(served: tuple[LocalService, httpx.AsyncClient]) -> None:
    service, client = served
    headers = {"authorization": "Bearer key-o"}
    async with client.stream("GET", WATCH, headers=headers) as reply:
        await anext(reply.aiter_bytes())
        assert service.is_watched
    async with asyncio.timeout(WAIT_S):
        while service.is_watched:
            await asyncio.sleep(0.01)


async def test_streams_end_at_a_front_end_that_is_to_go(
    served: tuple[LocalService, httpx.AsyncClient],
) -> None:
    service, client = served
    watching = asyncio.create_task(told_over_http(client, interval_s=60))
    async with asyncio.timeout(WAIT_S):
        while not service.is_watched:
            await asyncio.sleep(0.01)
        service.end_watching()
        _, told = await watching
    assert (told[-1][0], told[-1][1]["error"]["code"]) == ("error", "front_end_stops")
    assert not service.is_watched


async def test_all_places_taken_is_a_refusal_with_a_status(
    served: tuple[LocalService, httpx.AsyncClient],
) -> None:
    service, client = served
    async with AsyncExitStack() as stack:
        for _ in range(cluster_watch.MOST_WATCHERS):
            await stack.enter_async_context(service.watch(1.0, 10))
        status, ((_, body),) = await told_over_http(client, count=1)
    assert (status, body["error"]["code"]) == (503, "too_many_watchers")


async def test_a_shard_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    async with local_service(tmp_path) as service:
        first, second = service.rig.controller, local_controller(tmp_path / "second")
        shards: Any = (first, second)
        service._controller = ControllerCalls(shards)
        source = ClusterSource(
            service.replicas, service._controller, lambda entry, _: {"key": entry.session_id}
        )
        first.cluster.open_session("s", "", None, None)
        assert (await source.look(None, 9)).trouble is None
        assert 'kedge_controller_up{cluster="kedge",model="null-model"} 1.0' in await service.metrics_text()
        second.failures = {"view": [NoAnswer("away")], "measures": [NoAnswer("away")]}
        look = await source.look(None, 9)
        assert look.trouble == "without the sessions of controller shard 1, which does not answer"
        assert list(look.rows) == [{"key": "s"}]
        page = await service.metrics_text()
        assert 'kedge_controller_up{cluster="kedge",model="null-model"} 0.0' in page
        assert 'kedge_controller_sessions_unowned{cluster="kedge",model="null-model",shard="0"}' in page
        assert 'shard="1"' not in page
