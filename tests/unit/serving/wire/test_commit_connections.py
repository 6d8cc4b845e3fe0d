"""Turns that go to the controller over a connection: what the caller gets, and what goes to the actor instead."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import zmq
from ray.actor import ActorHandle

from controllers.commit_groups import Outcome
from controllers.errors import StaleEpoch
from controllers.records import Checkpoint, ModelFingerprint, SocketAddress, TurnRecord
from controllers.tokens import encode_tokens
from serving.wire import commit_client
from serving.wire.commit_client import CommitClient
from serving.wire.commit_messages import decode_records, encode_records
from serving.wire.commit_server import CommitServer
from serving.wire.shard_calls import ShardCalls

NODE, ELSEWHERE = "n1", "n2"


def turn(session_id: str) -> TurnRecord:
    return TurnRecord(session_id, 1, 0, 0, encode_tokens([1]), 1)


class Controller:
    """A controller with a server, whose log holds what `holds` names. It is also the actor that ShardCalls calls."""

    def __init__(self, holds: Sequence[str] = ("s", "t")) -> None:
        self.holds = set(holds)
        self.answers = asyncio.Event()
        self.answers.set()
        self.came: list[list[str]] = []
        self.asked: list[list[str]] = []
        self.fails = False
        self.open()

    def open(self) -> None:
        self.server = CommitServer(self._commit, "127.0.0.1", NODE)

    @property
    def handle(self) -> ActorHandle:
        methods = {"commit_address": self._address, "commit_turns": self._ask}
        return cast(
            ActorHandle,
            SimpleNamespace(**{name: SimpleNamespace(remote=each) for name, each in methods.items()}),
        )

    async def _address(self, key: bytes) -> SocketAddress:
        return self.server.admit(key)

    async def _commit(self, records: Sequence[TurnRecord]) -> list[Outcome]:
        self.came.append([record.session_id for record in records])
        await self.answers.wait()
        if self.fails:
            raise RuntimeError("a fault in the controller")
        return self._outcomes(records)

    async def _ask(self, records: Sequence[TurnRecord]) -> list[Outcome]:
        self.asked.append([record.session_id for record in records])
        return self._outcomes(records)

    def _outcomes(self, records: Sequence[TurnRecord]) -> list[Outcome]:
        return [None if each.session_id in self.holds else StaleEpoch(each.session_id) for each in records]


@asynccontextmanager
async def connected(
    controller: Controller, node: str = NODE
) -> AsyncIterator[tuple[ShardCalls, CommitClient]]:
    """Calls whose connection is open."""
    calls = ShardCalls(lambda: controller.handle, timeout_s=20.0, node_id=node)
    client = calls._connection
    assert client is not None
    try:
        await opened(client)
        controller.came.clear()
        controller.asked.clear()
        yield calls, client
    finally:
        calls.close()
        await controller.server.close()


async def opened(client: CommitClient) -> None:
    async with asyncio.timeout(20.0):
        while not client.is_open:
            assert list(await client.commit([turn("s")])) in ([False], [True])
            await asyncio.sleep(0.01)


async def under_way(controller: Controller, calls: ShardCalls) -> asyncio.Task[None]:
    """A commit that has come to the server."""
    task = asyncio.create_task(calls.commit_turn(turn("s")))
    while not controller.came:
        await asyncio.sleep(0.001)
    return task


@pytest.mark.parametrize("node", [NODE, ELSEWHERE])
async def test_a_turn_that_the_log_holds_needs_no_call_of_the_actor(node: str) -> None:
    controller = Controller()
    async with connected(controller, node) as (calls, _):
        await calls.commit_turn(turn("s"))
        assert (controller.came, controller.asked) == ([["s"]], [])


async def test_turns_that_come_together_are_one_message_and_the_actor_tells_why_one_is_refused() -> None:
    controller = Controller()
    async with connected(controller) as (calls, _):
        controller.answers.clear()
        first = await under_way(controller, calls)
        others = [asyncio.create_task(calls.commit_turn(turn(name))) for name in ("t", "u", "s")]
        await asyncio.sleep(0)
        controller.answers.set()
        told = await asyncio.gather(first, *others, return_exceptions=True)
        assert controller.came == [["s"], ["t", "u", "s"]]
        assert controller.asked == [["u"]]
        assert [type(each) for each in told] == [type(None), type(None), StaleEpoch, type(None)]


async def test_before_the_connection_is_open_the_actor_is_called_at_once() -> None:
    controller = Controller()
    calls = ShardCalls(lambda: controller.handle, timeout_s=20.0, node_id=NODE)
    await calls.commit_turn(turn("s"))
    assert (controller.came, controller.asked) == ([], [["s"]])
    assert calls._connection is not None
    await opened(calls._connection)
    calls.close()
    await controller.server.close()


async def test_when_the_controller_is_lost_its_turns_go_to_the_next_and_a_connection_too() -> None:
    """The answer is not waited for: the connection's end says that none will come."""
    controller = Controller()
    async with connected(controller) as (calls, client):
        controller.answers.clear()
        waiting = await under_way(controller, calls)
        lost, began_s = controller.server, asyncio.get_running_loop().time()
        controller.open()
        await asyncio.gather(lost.close(), waiting)
        assert asyncio.get_running_loop().time() - began_s < commit_client.ANSWER_TIMEOUT_S
        assert controller.asked == [["s"]]
        controller.answers.set()
        await opened(client)
        controller.came.clear()
        await calls.commit_turn(turn("t"))
        assert controller.came == [["t"]]


async def test_an_answer_that_does_not_come_is_waited_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit_client, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(commit_client, "SILENCE_PAUSE_S", 0.2)
    controller = Controller()
    async with connected(controller) as (calls, client):
        controller.answers.clear()
        await calls.commit_turn(turn("s"))
        assert controller.asked == [["s"]]
        assert not client.is_open
        controller.answers.set()
        for _ in range(3):  # a slow log does not get each turn by both ways
            await calls.commit_turn(turn("s"))
        assert len(controller.came) == 1
        await opened(client)


async def test_a_controller_that_moved_before_the_connection_opened_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client used to try the first address for ever, and every turn was a call of the actor."""
    monkeypatch.setattr(commit_client, "OPEN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(commit_client, "RECONNECT_PAUSE_S", 0.01)
    controller = Controller()
    moved = [SocketAddress(NODE, str(tmp_path / "gone"), "", "")]

    async def admit(key: bytes) -> SocketAddress:
        return moved.pop() if moved else controller.server.admit(key)

    client = CommitClient(admit, NODE)
    await opened(client)
    assert not moved
    client.close()
    await controller.server.close()


async def test_a_server_that_fails_answers_so_that_nobody_waits() -> None:
    controller = Controller()
    async with connected(controller) as (calls, client):
        controller.fails = True
        began_s = asyncio.get_running_loop().time()
        await calls.commit_turn(turn("s"))
        assert asyncio.get_running_loop().time() - began_s < commit_client.ANSWER_TIMEOUT_S
        assert controller.asked == [["s"]]
        assert client.is_open


async def test_a_server_that_cannot_listen_keeps_nothing_open_and_may_try_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It used to keep each try's sockets, until the controller had no more."""
    server = CommitServer(Controller()._commit, "192.0.2.1", NODE)  # of nobody (RFC 5737)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(3):
        with pytest.raises(zmq.ZMQError):
            server.admit(b"k" * 40)
    assert not server._sockets._sockets
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    server._sockets._host = "127.0.0.1"
    assert server.admit(b"k" * 40).url.startswith("tcp://127.0.0.1:")
    await server.close()


async def test_a_stranger_is_not_served() -> None:
    """Over TCP only keys that were admitted through Ray are."""
    controller = Controller()
    async with connected(controller, ELSEWHERE) as (_, client):
        address = controller.server.admit(b"k" * 40)

        async def elsewhere(_key: bytes) -> SocketAddress:
            return address

        stranger = CommitClient(elsewhere, ELSEWHERE)
        for _ in range(20):
            assert await stranger.commit([turn("s")]) == [False]
            await asyncio.sleep(0.02)
        assert not stranger.is_open
        assert client.is_open
        stranger.close()


async def test_turns_of_another_version_go_to_the_actor_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    async with connected(controller) as (calls, client):
        monkeypatch.setattr(commit_client, "encode_records", lambda _: b"\xc1")
        began_s = asyncio.get_running_loop().time()
        await calls.commit_turn(turn("s"))
        assert asyncio.get_running_loop().time() - began_s < commit_client.ANSWER_TIMEOUT_S
        assert (controller.came, controller.asked) == ([], [["s"]])
        assert client.is_open


async def test_a_controller_without_connections_is_asked_through_its_actor() -> None:
    """As one of the version before, until it is replaced."""
    controller = Controller()

    async def nowhere(_key: bytes) -> None:
        return None

    client = CommitClient(nowhere, NODE)
    assert await client.commit([turn("s"), turn("t")]) == [False, False]
    assert not client.is_open
    assert not controller.came
    client.close()


def test_a_record_travels_whole() -> None:
    record = TurnRecord(
        "tenant\x00s",
        3,
        4,
        5,
        encode_tokens([1, 2]),
        1,
        idempotency_key="k",
        result=b"\x00r",
        digest="d",
        tools="t",
        model=ModelFingerprint("t", "w", "c"),
        checkpoint=Checkpoint(2, b"\x00d", 7, "c"),
        whole=True,
        note=b"n",
        opening_len=1,
    )
    assert decode_records(encode_records([record])) == [record]
