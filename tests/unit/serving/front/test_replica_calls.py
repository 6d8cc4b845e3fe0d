"""Calls and turns from a front end to a replica over real sockets: answered, cancelled, and cut off in various ways."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front.replica_calls import ANY_REPLICA
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.front.replica_link import CALLS_AT_ONCE, LinkTimes
from serving.replica import link_server
from serving.replica.link_server import Emit
from serving.wire.calls import (
    Abort,
    AnyCall,
    Audit,
    Call,
    Flush,
    Request,
    RunAdaptedTurn,
    RunTurn,
    UnknownCall,
    answer_of,
    decode_request,
    encode_replies,
)
from serving.wire.turns import ErrorInfo, ServiceError, TokenPrompt, TurnCall, TurnEvent, TurnFinish
from serving.wire.versions import UNKNOWN_CALL
from tests.unit.serving.link_rig import ELSEWHERE, NODE, LinkRig, running_link

REFUSAL = ErrorInfo(409, "session_busy", "busy")
END = TurnEvent(finish=TurnFinish("stop"))
WAIT_S = 10.0
SHORT = LinkTimes(sign_of_life_s=0.1, silence_s=2.0, reopen_s=0.5)
"""For replicas that are lost."""


def turn(request_id: str = "r", tokens: int = 3) -> TurnCall:
    return TurnCall(request_id, TokenPrompt(tuple(range(tokens))), SamplingParams())


class Answers:
    """A replica's answers. A turn has as many tokens as its prompt, and ends only once `held` is set."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.held.set()
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, call: AnyCall, emit: Emit) -> None:
        match call:
            case Abort():
                emit(answer_of(7))
            case Flush():
                emit(answer_of(REFUSAL))
            case Audit():
                await asyncio.Event().wait()
            case RunTurn():
                await self._turn(call.turn, emit)

    async def _turn(self, call: TurnCall, emit: Emit) -> None:
        assert isinstance(call.prompt, TokenPrompt)
        self.begun.put_nowait(call.request_id)
        try:
            for token in call.prompt.token_ids:
                emit(TurnEvent(text=f"{token} ", token_ids=(token,)))
                await asyncio.sleep(0)
            await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(call.request_id)
            raise
        emit(END)


@pytest.fixture
async def answers() -> Answers:
    return Answers()


@pytest.mark.parametrize("node", [NODE, ELSEWHERE])
async def test_calls_are_answered(answers: Answers, node: str) -> None:
    async with running_link(answers.serve, node=node) as rig:
        assert await rig.calls.call("r", Abort(None, "")) == 7
        assert await rig.calls.call(ANY_REPLICA, Abort(None, "")) == 7
        assert await rig.calls.broadcast(Abort(None, "")) == [7]
        with pytest.raises(ServiceError) as caught:
            await rig.calls.call("r", Flush())
        assert caught.value.info == REFUSAL


class CallOfAnotherVersion(Call, frozen=True, tag="of_another_version"):
    """A call that a later front end may send."""


async def test_a_call_that_a_replica_does_not_know_is_refused_and_nothing_else(answers: Answers) -> None:
    """The link used to be lost, and all turns of that front end with it."""
    answers.held.clear()
    async with running_link(answers.serve) as rig, rig.calls.turn("r", turn(), None) as events:
        await anext(events)
        with pytest.raises(ServiceError) as caught:
            await rig.calls.call("r", CallOfAnotherVersion())  # type: ignore[arg-type]
        assert caught.value.info == UNKNOWN_CALL
        answers.held.set()
        assert (await rest_of(events))[-1].finish == END.finish


async def test_a_replica_without_adapters_refuses_a_turn_that_has_one(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to skip the field, and to answer with the model itself."""

    def older(body: bytes) -> Request:
        request = decode_request(body)
        if isinstance(request.call, RunAdaptedTurn):
            raise UnknownCall(request.number)
        return request

    monkeypatch.setattr(link_server, "decode_request", older)
    async with running_link(answers.serve) as rig:
        assert await events_of(rig.calls, replace(turn(), adapter="a")) == ([], TurnEvent(error=UNKNOWN_CALL))
        assert answers.begun.empty()
        assert (await events_of(rig.calls, turn()))[0] == [0, 1, 2]


async def test_a_call_that_cannot_be_written_leaves_nothing_behind(answers: Answers) -> None:
    async with running_link(answers.serve) as rig:
        assert await rig.calls.call("r", Abort(None, "")) == 7
        too_large = TurnCall("r", TokenPrompt((2**70,)), SamplingParams())
        with pytest.raises(ServiceError) as caught:
            await events_of(rig.calls, too_large)
        assert (caught.value.info.status, caught.value.info.code) == (500, "internal_error")
        assert all(link.calls == 0 for link in rig.calls._links.values())


class EventsTogether:
    """A replica at which the call of the turn "bad" sends what cannot be written, in the same step as the last event of
    the turn "good"."""

    def __init__(self) -> None:
        self.emit_good: asyncio.Future[Emit] = asyncio.get_running_loop().create_future()
        self.cancelled = asyncio.Event()

    async def serve(self, call: AnyCall, emit: Emit) -> None:
        match call:
            case RunTurn() if call.turn.request_id == "good":
                self.emit_good.set_result(emit)
            case RunTurn():
                (await self.emit_good)(END)
                emit(TurnEvent(text="half \ud800"))
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            case Flush():
                emit(answer_of(ErrorInfo(400, "invalid_request", "half \ud800")))


async def test_what_cannot_be_written_spoils_nothing_of_another_call() -> None:
    """The events of all turns in the same message were lost, and these turns never ended."""
    replica = EventsTogether()
    async with running_link(replica.serve) as rig, asyncio.timeout(WAIT_S):
        (_, good), (_, bad) = await asyncio.gather(
            events_of(rig.calls, turn("good")), events_of(rig.calls, turn("bad"))
        )
        assert good == END
        assert bad.error is not None
        assert (bad.error.status, bad.error.code) == (500, "internal_error")
        await replica.cancelled.wait()
        with pytest.raises(ServiceError) as caught:
            await rig.calls.call("r", Flush())
        assert caught.value.info.code == "internal_error"


async def events_of(calls: object, call: TurnCall) -> tuple[list[int], TurnEvent]:
    async with calls.turn("r", call, None) as events:  # type: ignore[attr-defined]
        got = [event async for event in events]
    return [token for event in got for token in event.token_ids], got[-1]


@pytest.mark.parametrize("node", [NODE, ELSEWHERE])
async def test_turns_side_by_side_have_their_own_events_in_order(answers: Answers, node: str) -> None:
    async with running_link(answers.serve, node=node) as rig:
        turns = [events_of(rig.calls, turn(f"r{count}", count)) for count in range(1, 60)]
        for count, (tokens, last) in enumerate(await asyncio.gather(*turns), 1):
            assert tokens == list(range(count))
            assert last.finish == END.finish
        await until(lambda: rig.server.calls == 0)


async def test_leaving_cancels_the_turn_there(answers: Answers) -> None:
    answers.held.clear()
    async with running_link(answers.serve) as rig:
        async with rig.calls.turn("r", turn("left"), None) as events:
            await anext(events)
        assert await asyncio.wait_for(answers.cancelled.get(), WAIT_S) == "left"


async def test_a_call_that_takes_too_long_is_given_up_there(answers: Answers) -> None:
    """It used to look as if the replica were gone."""
    async with running_link(answers.serve, times=LinkTimes()) as rig:
        assert await rig.calls.call("r", Abort(None, "")) == 7
        with pytest.raises(ReplicaLate) as caught:
            await rig.calls.call("r", Audit(), 0.05)
        assert (caught.value.info.status, caught.value.info.code) == (503, "replica_unavailable")
        assert not await rig.calls.any_answers(0.05)
        assert await rig.calls.call("r", Abort(None, "")) == 7
        await until(lambda: rig.server.calls == 0)


def deafen(rig: LinkRig) -> None:
    """The replica takes no more messages, but no connection breaks."""
    for socket in rig.sockets._sockets:
        socket._take = lambda _frames: None


async def test_a_call_without_an_answer_finds_a_silent_replica_gone(answers: Answers) -> None:
    """It finds out before the link does, which waits for longer."""
    times = LinkTimes(sign_of_life_s=0.01, silence_s=3600.0, reopen_s=3600.0)
    async with running_link(answers.serve, times=times) as rig:
        assert await rig.calls.call("r", Abort(None, "")) == 7
        deafen(rig)
        with pytest.raises(ReplicaGone) as caught:
            await rig.calls.call("r", Audit(), 0.5)
        assert caught.value.loss is Loss.UNREACHABLE


async def rest_of(events: AsyncIterator[TurnEvent]) -> list[TurnEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in events]


async def until(holds: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_replica_that_nobody_lists_is_unknown(answers: Answers) -> None:
    async with running_link(answers.serve) as rig:
        with pytest.raises(ReplicaGone) as caught:
            await rig.calls.call("x", Abort(None, ""))
        assert (caught.value.replica_id, caught.value.loss) == ("x", Loss.UNKNOWN)


@pytest.mark.parametrize("node", [NODE, ELSEWHERE])
@pytest.mark.parametrize("died", [True, False])
async def test_a_replica_that_ends_during_a_turn_is_lost(answers: Answers, node: str, died: bool) -> None:
    """It is lost at once if Ray knows that its process has ended, else after the time to connect again."""
    answers.held.clear()
    async with running_link(answers.serve, node=node, times=SHORT) as rig:
        async with rig.calls.turn("r", turn(), None) as events:
            await anext(events)
            rig.died = died
            await rig.sockets.close()
            with pytest.raises(ReplicaGone) as caught:
                await rest_of(events)
        assert caught.value.loss is (Loss.DIED if died else Loss.UNREACHABLE)
        assert rig.broken == 1


async def test_a_call_to_a_replica_that_has_ended_never_reached_it(answers: Answers) -> None:
    answers.held.clear()
    async with (
        running_link(answers.serve, times=SHORT) as rig,
        rig.calls.turn("r", turn("1"), None) as events,
    ):
        await anext(events)
        await rig.sockets.close()
        await until(lambda: rig.calls._links["r"].broken)
        async with rig.calls.turn("r", turn("2"), None) as late:
            for told, had_call in ((late, False), (events, True)):
                with pytest.raises(ReplicaGone) as caught:
                    await rest_of(told)
                assert caught.value.had_call is had_call


async def test_a_silent_replica_is_lost(answers: Answers) -> None:
    answers.held.clear()
    async with running_link(answers.serve, times=SHORT) as rig, rig.calls.turn("r", turn(), None) as events:
        await anext(events)
        deafen(rig)
        with pytest.raises(ReplicaGone):
            await rest_of(events)


async def test_who_lacks_the_clusters_secret_is_not_heard_from_elsewhere(answers: Answers) -> None:
    async with running_link(answers.serve, node=ELSEWHERE, secret=b"x" * 32, times=SHORT) as rig:
        with pytest.raises(ReplicaGone):
            await rig.calls.call("r", Abort(None, ""))
        assert len(rig.server) == 0


async def test_on_its_node_only_its_user_reaches_it(answers: Answers) -> None:
    async with running_link(answers.serve) as rig:
        path = Path(rig.address.path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    assert not path.parent.exists()


async def test_a_front_end_that_is_gone_takes_its_turns_along(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.replica.link_server.UNREACHABLE_S", 0.0)
    answers.held.clear()
    async with running_link(answers.serve) as rig, rig.calls.turn("r", turn("orphan"), None) as events:
        await anext(events)
        link = rig.calls._links["r"]
        link._connection.close()  # looks as if the replica's process had ended
        monkeypatch.setattr("serving.replica.link_server.SIGN_OF_LIFE_S", 0.0)

        async def dropped() -> None:
            while rig.server.calls:
                await rig.server.watch()
                await asyncio.sleep(0.02)

        await asyncio.wait_for(dropped(), WAIT_S)
        assert await asyncio.wait_for(answers.cancelled.get(), WAIT_S) == "orphan"
        link.lose(ReplicaGone("r"))


async def test_what_several_messages_tell_of_a_turn_is_read_at_once(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end that is behind would otherwise write each event by itself, and fall further behind."""
    answers.held.clear()
    async with running_link(answers.serve) as rig, AsyncExitStack() as stack:
        calls = [turn(f"r{count}", 1) for count in range(2 * CALLS_AT_ONCE)]
        turns = [await stack.enter_async_context(rig.calls.turn("r", call, None)) for call in calls]
        for events in turns:
            await anext(events)
        (link,) = rig.server._links.values()
        front = rig.calls._links["r"]
        late: list[tuple[bytes, bytes]] = []
        with monkeypatch.context() as behind:
            behind.setattr(front, "frame_came", lambda header, body: late.append((header, body)))
            for token in range(5):
                for number in range(len(calls)):
                    link.put(number, TurnEvent(token_ids=(token,)))
                link._flush()
            last = encode_replies([(number, TurnEvent(token_ids=(4,))) for number in range(len(calls))])
            await until(lambda: any(body == last for _, body in late))  # others may be sent twice
        for frame in late:
            front.frame_came(*frame)
        for events in turns:
            assert (await asyncio.wait_for(anext(events), WAIT_S)).token_ids == (0, 1, 2, 3, 4)
        answers.held.set()
