"""A turn that loses its replica in mid-stream goes on at another: the client sees one answer, the session has one
turn."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from controllers.errors import NoReplica, StaleEpoch
from controllers.tokens import unpack_tokens
from engine.api import (
    EngineOverloaded,
    GenerateRequest,
    LogprobParams,
    RequestTooLarge,
    SamplingParams,
)
from engine.batch import ModelOutput, ScheduledBatch
from engine.settings import SpeculationSettings
from serving.front import session_owners
from serving.front.replica_gone import ReplicaGone
from serving.text.text import TextProcessor
from serving.wire.turn_events import merge_events
from serving.wire.turns import OutputConstraint, ResumedTurn, ServiceError, TurnCall, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import STEP_S, Failover, at_the_end, behind, running_failover
from tests.unit.serving.local_service import shown_text, small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE, WAIT_S, call, running_rig
from tests.unit.serving.small_tokenizer import piece_tokenizer

LENGTH = 30
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)
WHOLE = null_generate([5, 6, 7], LENGTH, VOCAB_SIZE)
STOP = shown_text(WHOLE[:20])[-2:]
LOGPROBS = LogprobParams(output=True, top=1, input_start=0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    async with running_failover(tmp_path) as failover:
        yield failover
        await failover.settled()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)


def turn_of(session: str | None, **options: Any) -> TurnCall:
    return call([5, 6, 7], session, max_new_tokens=LENGTH, **options)


def answer(event: TurnEvent) -> TurnEvent:
    """The part of an event that must not depend on where and when the turn ran."""
    return replace(
        event,
        cached_tokens=0,
        draft_tokens=0,
        accepted_draft_tokens=0,
        turn_index=None,
        open_key=None,
        ended_s=None,
        replayed=False,
    )


def code_of(event: TurnEvent) -> str | None:
    return None if event.error is None else event.error.code


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"seed": 3, "sampling": SAMPLED},
    "log-probabilities": {"logprobs": LOGPROBS},
    "stop token": {"sampling": dataclasses.replace(GREEDY, stop_token_ids=frozenset(WHOLE[20:21]))},
    "stop string": {"stop": (STOP,)},
    "stop string, not trimmed": {"stop": (STOP,), "trim_stop": False},
    "stop where nothing may follow": {"constraint": OutputConstraint("regex", "[0-9]{16}")},
    "held": {"constraint": OutputConstraint("regex", "[0-9a-f]{100}")},
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("told", [1, 4, 11])
async def test_the_answer_is_that_of_an_undisturbed_turn(served: Failover, what: str, told: int) -> None:
    served.open_session("lossy")
    served.open_session("calm")
    calm = await served.turn(replace(turn_of("calm"), **CALLS[what]))
    served.replicas.losses = {"a": behind(told)}
    lossy = await served.turn(replace(turn_of("lossy"), **CALLS[what]))
    assert answer(lossy) == answer(calm)
    assert len(lossy.token_ids) > 12
    assert (len(lossy.token_ids) < LENGTH) is what.startswith("stop")
    assert served.committed("lossy") == served.committed("calm")
    (resumed,) = (asked.resumed for _, asked in served.replicas.calls if asked.resumed is not None)
    assert 0 < len(resumed.token_ids) < len(lossy.token_ids)
    following = [await served.turn(turn_of(name)) for name in ("calm", "lossy")]
    assert answer(following[0]) == answer(following[1])
    assert following[1].prompt_tokens == 3 + len(lossy.token_ids) + 3


@pytest.mark.parametrize("told", [1, 6])
async def test_calls_without_a_session_go_on_too(served: Failover, told: int) -> None:
    served.replicas.losses = {"a": behind(told)}
    whole = await served.turn(turn_of(None))
    assert list(whole.token_ids) == WHOLE
    assert (whole.prompt_tokens, whole.completion_tokens) == (3, LENGTH)
    assert [name for name, _ in served.replicas.calls] == ["a", "b"]
    assert 'kedge_takeovers_total{ingress="i"} 1.0' in served.metrics.render()


async def test_replicas_that_round_differently_give_one_answer(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replica gets the tokens that the client has. It does not generate them again and hope that they are the
    same."""
    runner = served.rigs[1].runner
    execute = runner.execute

    def other_tokens(batch: ScheduledBatch) -> ModelOutput:
        output = execute(batch)
        return ModelOutput(
            [dataclasses.replace(item, token_ids=tuple(1 for _ in item.token_ids)) for item in output.items]
        )

    monkeypatch.setattr(runner, "execute", other_tokens)
    served.open_session("s")
    served.replicas.losses = {"a": behind(5)}
    whole = await served.turn(turn_of("s"))
    ((_, _), (_, asked)) = served.replicas.calls
    assert asked.resumed is not None
    known = len(asked.resumed.token_ids)
    assert list(whole.token_ids) == WHOLE[:known] + [1] * (LENGTH - known)
    (epoch,) = (entry.epoch for entry in served.cluster.sessions())
    record = served.cluster.load_session("s", epoch, "b")
    assert unpack_tokens(record.history).tolist() == [5, 6, 7, *whole.token_ids]


async def test_drafts_are_made_behind_what_is_resumed(tmp_path: Path) -> None:
    speculation = SpeculationSettings("ngram", max_draft_tokens=4, ngram_size=1, row_cost=0.0)
    async with running_failover(tmp_path, speculation=speculation) as served:
        served.replicas.losses = {"a": behind(2)}
        prompt = list(range(1, 400))
        whole = await served.turn(call(prompt, max_new_tokens=20))
        assert list(whole.token_ids) == null_generate(prompt, 20, VOCAB_SIZE)
        assert len(served.replicas.calls) == 2
        await served.settled()


async def test_a_retry_of_a_turn_that_went_on_is_answered_whole(served: Failover) -> None:
    """The answer includes the log-probabilities that the lost replica had sent."""
    served.open_session("s")
    served.replicas.losses = {"a": behind(7)}
    asked = turn_of("s", key="k", logprobs=LOGPROBS)
    first = await served.turn(asked)
    again = await served.turn(asked)
    assert again.finish is not None
    assert again.replayed
    assert answer(replace(again, finish=first.finish)) == answer(first)
    assert len(again.logprobs) == len(again.token_ids) == LENGTH
    assert len(again.input_logprobs) == 3
    assert served.committed("s") == (1, 3 + LENGTH)


async def test_a_replica_that_only_seemed_lost_cannot_commit(served: Failover) -> None:
    served.open_session("s")
    served.replicas.seems_lost = True
    served.replicas.losses = {"a": behind(3)}
    whole = await served.turn(turn_of("s"))
    (unheard,) = await asyncio.gather(*served.replicas.unheard)
    assert code_of(unheard[-1]) == "stale_epoch"
    assert list(whole.token_ids) == WHOLE
    assert served.committed("s") == (1, 3 + LENGTH)


async def test_a_turn_that_was_committed_before_its_replica_died_is_answered_from_the_log(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the answer, or only its end, comes from the log. Nothing runs again."""
    resolve = served.cluster.resolve

    def once_it_has_committed(*args: Any) -> Any:
        """Lets the session move once its old owner has committed."""
        turns = [served.rigs[0].turns.num_live for _ in served.replicas.dead]
        if any(turns):
            raise NoReplica("not yet")
        return resolve(*args)

    monkeypatch.setattr(served.cluster, "resolve", once_it_has_committed)
    served.open_session("s")
    served.replicas.seems_lost = True
    served.replicas.losses = {"a": behind(5)}
    whole = await served.turn(turn_of("s"))
    assert list(whole.token_ids) == WHOLE
    assert whole.finish is not None
    assert not whole.replayed, "the client did not ask twice"
    assert served.committed("s") == (1, 3 + LENGTH)
    assert served.rigs[1].engine.stats().generated_tokens == 0


@pytest.mark.parametrize("committed", [False, True])
async def test_when_all_but_the_end_was_told_the_end_is_told(served: Failover, committed: bool) -> None:
    served.open_session("s")
    served.replicas.losses = {"a": at_the_end}
    if not committed:
        served.controller.failures["commit_turn"] = [StaleEpoch("killed before it was written")]
    whole = await served.turn(turn_of("s", stop=("no such text",)))
    assert list(whole.token_ids) == WHOLE
    assert whole.text == shown_text(list(whole.token_ids))
    assert (whole.prompt_tokens, whole.completion_tokens) == (3, LENGTH)
    assert whole.finish is not None
    assert (whole.finish.reason, whole.replayed) == ("length", False)
    assert served.committed("s") == (1, 3 + LENGTH)
    assert served.rigs[1].engine.stats().steps == 0


async def test_input_log_probabilities_are_told_once_if_that_was_all(served: Failover) -> None:
    """The prompt is longer than a chunk, so its log-probabilities come before any token."""
    prompt = list(range(1, 101))
    served.replicas.losses = {"a": lambda _, event: bool(event.token_ids)}
    whole = await served.turn(call(prompt, logprobs=LOGPROBS))
    assert [entry.token.token_id for entry in whole.input_logprobs] == prompt
    assert list(whole.token_ids) == null_generate(prompt, 8, VOCAB_SIZE)
    assert [name for name, _ in served.replicas.calls] == ["a", "b"]
    assert served.replicas.calls[1][1].resumed == ResumedTurn((), turn_index=None)


@pytest.mark.parametrize("session", ["s", None])
async def test_a_turn_that_was_accepted_and_has_said_nothing_begins_anew(
    served: Failover, session: str | None
) -> None:
    """Its client has the headers, and hears only once that the turn is accepted."""
    if session is not None:
        served.open_session(session)
    served.replicas.losses = {"a": behind(1)}
    events = [
        event async for event in served.events(turn_of(session, logprobs=LOGPROBS, tells_accepted=True))
    ]
    assert [event.says_nothing for event in events] == [True] + [False] * (len(events) - 1)
    assert events[0].turn_index == (None if session is None else 0)
    whole = merge_events(events)
    assert list(whole.token_ids) == WHOLE
    assert (len(whole.input_logprobs), len(whole.logprobs)) == (3, LENGTH)
    assert [name for name, _ in served.replicas.calls] == ["a", "b"]


async def test_a_session_closed_meanwhile_ends_the_turn_and_does_not_begin_anew(served: Failover) -> None:
    served.open_session("s")
    served.replicas.losses = {"a": behind(3)}
    async with aclosing(served.events(turn_of("s"))) as events:
        await anext(events)
        served.cluster.close_session("s")
        *_, last = [event async for event in events]
    assert code_of(last) == "session_not_found"
    assert served.cluster.sessions() == []


@pytest.mark.parametrize("opened_anew", [False, True])
async def test_a_repeated_call_is_committed_in_no_later_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_anew: bool
) -> None:
    """A call is committed and loses its connection with the answer. The session closes, and the call is sent again. It
    used to be committed in another session of that name, which it opened itself or which another turn had opened
    (simulated seed 1000697 of 1,000 turns). Later its client heard that only after `failover_timeout_s`."""
    async with running_failover(tmp_path) as served:
        deliver = served.replicas.turn

        @asynccontextmanager
        async def lose_the_answer(*args: Any) -> AsyncIterator[AsyncIterator[TurnEvent]]:
            monkeypatch.setattr(served.replicas, "turn", deliver)
            async with deliver(*args) as events:
                assert [event.finish for event in [event async for event in events]][-1] is not None
            served.cluster.close_session("s")
            if opened_anew:
                served.cluster.open_session("s", "", None, None)
            raise ReplicaGone("a")
            yield

        monkeypatch.setattr(served.replicas, "turn", lose_the_answer)
        served.open_session("s")
        turn = call([5, 6, 7], "s", max_new_tokens=4)
        assert turn.session is not None
        with pytest.raises(ServiceError) as caught:
            await served.turn(replace(turn, session=replace(turn.session, create=True)))
        assert caught.value.info.code == "session_not_found"
        assert len(served.replicas.calls) == 1 + 2 * opened_anew, "a remembered owner, then the one that is"
        assert [entry.turns for entry in served.cluster.sessions()] == [0] * opened_anew


async def test_a_turn_runs_in_the_session_that_was_open_when_it_came(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another front end has closed the session and opened it anew. The owner that this one remembers is gone. The turn
    used to be refused as one of the closed session (simulated seed 661262985)."""
    served.open_session("s")
    await served.turn(turn_of("s"))
    assert await served.rigs[0].host.close("s", 1)
    served.cluster.open_session("s", "", None, None, "another")
    monkeypatch.setattr(served.cluster, "_clock", lambda: time.time() + 1.0)
    served.replicas.dead.add("a")
    assert list((await served.turn(turn_of("s"))).token_ids) == WHOLE
    [entry] = served.cluster.sessions()
    assert (entry.open_key, entry.turns) == ("another", 1)


@pytest.mark.parametrize("by_its_first_turn", [True, False])
async def test_a_turn_does_not_go_on_in_a_later_session_of_that_name(
    served: Failover, by_its_first_turn: bool
) -> None:
    """This holds although it would be a turn with the same number there."""
    served.open_session("s")
    served.replicas.losses = {"a": behind(3)}
    async with aclosing(served.events(turn_of("s"))) as events:
        await anext(events)
        served.cluster.register_replica(served.rigs[1].heartbeats.status())
        served.cluster.report_unreachable("a", True)
        served.cluster.close_session("s")
        if by_its_first_turn:
            served.cluster.resolve("s", True, "")
        else:
            served.cluster.open_session("s", "", None, None, "another")
        *_, last = [event async for event in events]
    assert code_of(last) == "replica_lost"
    [entry] = served.cluster.sessions()
    assert entry.turns == 0


async def test_a_turn_that_another_one_passed_does_not_go_on(served: Failover) -> None:
    """What the turn had said was an answer to another history."""
    served.open_session("s")
    served.replicas.losses = {"a": behind(3)}
    ends: list[TurnEvent] = []
    async with aclosing(served.events(turn_of("s"))) as events:
        await anext(events)
        served.cluster.register_replica(served.rigs[1].heartbeats.status())
        served.cluster.report_unreachable("a", True)
        other = await served.rigs[1].run(call([1, 2], "s"), served.cluster.resolve("s", False, "").epoch)
        assert other[-1].finish is not None
        ends = [event async for event in events]
    assert code_of(ends[-1]) == "replica_lost"
    assert served.committed("s") == (1, 10)
    assert (await served.turn(call([3], "s"))).finish is not None


async def test_a_session_that_moved_under_its_turn_takes_the_turn_along(served: Failover) -> None:
    """No replica was lost, but another ingress believed so. The old owner's commit is refused, the new owner's is
    accepted."""
    served.open_session("s")
    async with aclosing(served.events(turn_of("s"))) as events:
        told = [*(await anext(events)).token_ids]
        served.cluster.report_unreachable("a", True)
        served.cluster.resolve("s", False, "")
        async for event in events:
            told += event.token_ids
    assert event.finish is not None
    assert told == WHOLE
    assert [name for name, _ in served.replicas.calls][-1] == "b"
    assert served.committed("s") == (1, 3 + LENGTH)


async def test_an_engine_that_stops_in_mid_stream_is_as_good_as_lost(served: Failover) -> None:
    served.open_session("s")
    async with aclosing(served.events(turn_of("s"))) as events:
        told = [*(await anext(events)).token_ids]
        await asyncio.to_thread(served.rigs[0].engine.stop, 5.0)
        served.replicas.dead.add("a")  # as Ray Serve does when the health check fails
        async for event in events:
            told += event.token_ids
    assert event.finish is not None
    assert told == WHOLE
    served.rigs.pop(0)


async def test_nobody_takes_over_in_time(tmp_path: Path) -> None:
    async with running_failover(tmp_path, failover_timeout_s=0.1) as served:
        served.open_session("s")
        served.replicas.losses = {"a": behind(3)}
        served.replicas.dead.add("b")
        last = await served.turn(turn_of("s"))
        assert code_of(last) == "no_replica"
        assert list(last.token_ids) == WHOLE[: len(last.token_ids)]
        served.replicas.dead.clear()
        for rig in served.rigs:
            await rig.heartbeats.beat()  # the replica hears that it counts as gone, and registers again
        assert (await served.turn(turn_of("s"))).finish is not None
        await served.settled()


async def test_who_is_in_mid_stream_waits_for_room(served: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    """All turns of the lost replica come at once, perhaps more than the others can take."""
    submit, refused = served.rigs[1].engine.submit, 0

    def full_at_first(request: GenerateRequest) -> None:
        nonlocal refused
        refused += 1
        if refused < 4:
            raise EngineOverloaded("the queue is full")
        submit(request)

    monkeypatch.setattr(served.rigs[1].engine, "submit", full_at_first)
    served.replicas.losses = {"a": behind(3)}
    assert (await served.turn(turn_of(None))).finish is not None
    assert refused == 4


async def test_what_no_other_replica_takes_is_lost(served: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica accepted the request, so its client is not told to change it."""
    monkeypatch.setattr(served.rigs[1].engine, "submit", Mock(side_effect=RequestTooLarge("a smaller pool")))
    served.replicas.losses = {"a": behind(3)}
    assert code_of(await served.turn(turn_of(None))) == "replica_lost"


async def test_an_abort_reaches_the_replica_that_went_on(served: Failover) -> None:
    served.open_session("s")
    served.replicas.losses = {"a": behind(3)}
    async with aclosing(served.events(turn_of("s", request_id="mine"))) as events:
        while "a" not in served.replicas.dead:
            await anext(events)
        assert served.rigs[1].turns.abort("mine", "") == 1
        *_, last = [event async for event in events]
    assert last.finish is not None
    assert last.finish.reason == "abort"
    assert served.committed("s") == (0, 0)


@pytest.mark.parametrize("moments", [0, 1, 3, 10, 30, 100])
async def test_a_client_that_leaves_during_the_takeover_leaves_no_trace(
    served: Failover, moments: int
) -> None:
    """The client leaves while an owner is looked for, while the new owner loads the history, and after the turn went
    on."""
    served.open_session("s")
    served.replicas.losses = {"a": behind(3)}
    reading = asyncio.create_task(served.turn(call([5, 6, 7], "s", max_new_tokens=400)))
    while "a" not in served.replicas.dead:
        await asyncio.sleep(0)
    for _ in range(moments):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await served.settled()
    assert reading.cancelled()
    assert served.committed("s") == (0, 0)
    assert (await served.turn(turn_of("s"))).completion_tokens == LENGTH


@pytest.mark.parametrize("session", ["s", None])
async def test_a_replica_of_another_tokenizer_does_not_go_on_with_an_answer(
    tmp_path: Path, session: str | None
) -> None:
    """That replica used to go on with the tokens as if they were its own: the rest of the answer continued something
    that nobody had said."""
    other = TextProcessor(piece_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=512)
    async with (
        running_rig(tmp_path, replica_id="a", text=small_text()) as former,
        running_rig(tmp_path, replica_id="b", text=other, controller=former.controller) as newer,
    ):
        former.runner.step_s = newer.runner.step_s = STEP_S
        served = Failover([former, newer], WAIT_S)
        served.open_session("s")
        served.replicas.losses = {"a": behind(4)}
        event = await served.turn(turn_of(session))
        assert event.error is not None
        assert (event.error.status, event.error.code) == (409, "model_changed")
        assert list(event.token_ids) == WHOLE[: len(event.token_ids)]
        assert served.committed("s") == (0, 0)
        again = await served.turn(turn_of(session))
        assert (again.error, list(again.token_ids)) == (None, WHOLE)
        await served.settled()
