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
async def test_the_answer_is_that_of_an_undisturbed_turn(failover: Failover, what: str, told: int) -> None:
    failover.open_session("lossy")
    failover.open_session("calm")
    calm = await failover.turn(replace(turn_of("calm"), **CALLS[what]))
    failover.replicas.losses = {"a": behind(told)}
    lossy = await failover.turn(replace(turn_of("lossy"), **CALLS[what]))
    assert answer(lossy) == answer(calm)
    assert len(lossy.token_ids) > 12
    assert (len(lossy.token_ids) < LENGTH) is what.startswith("stop")
    assert failover.committed("lossy") == failover.committed("calm")
    (resumed,) = (asked.resumed for _, asked in failover.replicas.calls if asked.resumed is not None)
    assert 0 < len(resumed.token_ids) < len(lossy.token_ids)
    following = [await failover.turn(turn_of(name)) for name in ("calm", "lossy")]
    assert answer(following[0]) == answer(following[1])
    assert following[1].prompt_tokens == 3 + len(lossy.token_ids) + 3


@pytest.mark.parametrize("told", [1, 6])
async def test_calls_without_a_session_go_on_too(failover: Failover, told: int) -> None:
    failover.replicas.losses = {"a": behind(told)}
    whole = await failover.turn(turn_of(None))
    assert list(whole.token_ids) == WHOLE
    assert (whole.prompt_tokens, whole.completion_tokens) == (3, LENGTH)
    assert [name for name, _ in failover.replicas.calls] == ["a", "b"]
    assert 'kedge_takeovers_total{ingress="i"} 1.0' in failover.metrics.render()


async def test_replicas_that_round_differently_give_one_answer(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replica gets the tokens that the client has. It does not generate them again and hope that they are the
    same."""
    runner = failover.rigs[1].runner
    execute = runner.execute

    def other_tokens(batch: ScheduledBatch) -> ModelOutput:
        output = execute(batch)
        return ModelOutput(
            [dataclasses.replace(item, token_ids=tuple(1 for _ in item.token_ids)) for item in output.items]
        )

    monkeypatch.setattr(runner, "execute", other_tokens)
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(5)}
    whole = await failover.turn(turn_of("s"))
    ((_, _), (_, asked)) = failover.replicas.calls
    assert asked.resumed is not None
    known = len(asked.resumed.token_ids)
    assert list(whole.token_ids) == WHOLE[:known] + [1] * (LENGTH - known)
    (epoch,) = (entry.epoch for entry in failover.cluster.sessions())
    record = failover.cluster.load_session("s", epoch, "b")
    assert unpack_tokens(record.history).tolist() == [5, 6, 7, *whole.token_ids]


async def test_drafts_are_made_behind_what_is_resumed(tmp_path: Path) -> None:
    speculation = SpeculationSettings("ngram", max_draft_tokens=4, ngram_size=1, row_cost=0.0)
    async with running_failover(tmp_path, speculation=speculation) as failover:
        failover.replicas.losses = {"a": behind(2)}
        prompt = list(range(1, 400))
        whole = await failover.turn(call(prompt, max_new_tokens=20))
        assert list(whole.token_ids) == null_generate(prompt, 20, VOCAB_SIZE)
        assert len(failover.replicas.calls) == 2
        await failover.settled()


async def test_a_retry_of_a_turn_that_went_on_is_answered_whole(failover: Failover) -> None:
    """The answer includes the log-probabilities that the lost replica had sent."""
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(7)}
    asked = turn_of("s", key="k", logprobs=LOGPROBS)
    first = await failover.turn(asked)
    again = await failover.turn(asked)
    assert again.finish is not None
    assert again.replayed
    assert answer(replace(again, finish=first.finish)) == answer(first)
    assert len(again.logprobs) == len(again.token_ids) == LENGTH
    assert len(again.input_logprobs) == 3
    assert failover.committed("s") == (1, 3 + LENGTH)


async def test_a_replica_that_only_seemed_lost_cannot_commit(failover: Failover) -> None:
    failover.open_session("s")
    failover.replicas.seems_lost = True
    failover.replicas.losses = {"a": behind(3)}
    whole = await failover.turn(turn_of("s"))
    (unheard,) = await asyncio.gather(*failover.replicas.unheard)
    assert code_of(unheard[-1]) == "stale_epoch"
    assert list(whole.token_ids) == WHOLE
    assert failover.committed("s") == (1, 3 + LENGTH)


async def test_a_turn_that_was_committed_before_its_replica_died_is_answered_from_the_log(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the answer, or only its end, comes from the log. Nothing runs again."""
    resolve = failover.cluster.resolve

    def once_it_has_committed(*args: Any) -> Any:
        """Lets the session move once its old owner has committed."""
        turns = [failover.rigs[0].turns.num_live for _ in failover.replicas.dead]
        if any(turns):
            raise NoReplica("not yet")
        return resolve(*args)

    monkeypatch.setattr(failover.cluster, "resolve", once_it_has_committed)
    failover.open_session("s")
    failover.replicas.seems_lost = True
    failover.replicas.losses = {"a": behind(5)}
    whole = await failover.turn(turn_of("s"))
    assert list(whole.token_ids) == WHOLE
    assert whole.finish is not None
    assert not whole.replayed, "the client did not ask twice"
    assert failover.committed("s") == (1, 3 + LENGTH)
    assert failover.rigs[1].engine.stats().generated_tokens == 0


@pytest.mark.parametrize("committed", [False, True])
async def test_when_all_but_the_end_was_told_the_end_is_told(failover: Failover, committed: bool) -> None:
    failover.open_session("s")
    failover.replicas.losses = {"a": at_the_end}
    if not committed:
        failover.controller.failures["commit_turn"] = [StaleEpoch("killed before it was written")]
    whole = await failover.turn(turn_of("s", stop=("no such text",)))
    assert list(whole.token_ids) == WHOLE
    assert whole.text == shown_text(list(whole.token_ids))
    assert (whole.prompt_tokens, whole.completion_tokens) == (3, LENGTH)
    assert whole.finish is not None
    assert (whole.finish.reason, whole.replayed) == ("length", False)
    assert failover.committed("s") == (1, 3 + LENGTH)
    assert failover.rigs[1].engine.stats().steps == 0


async def test_input_log_probabilities_are_told_once_if_that_was_all(failover: Failover) -> None:
    """The prompt is longer than a chunk, so its log-probabilities come before any token."""
    prompt = list(range(1, 101))
    failover.replicas.losses = {"a": lambda _, event: bool(event.token_ids)}
    whole = await failover.turn(call(prompt, logprobs=LOGPROBS))
    assert [entry.token.token_id for entry in whole.input_logprobs] == prompt
    assert list(whole.token_ids) == null_generate(prompt, 8, VOCAB_SIZE)
    assert [name for name, _ in failover.replicas.calls] == ["a", "b"]
    assert failover.replicas.calls[1][1].resumed == ResumedTurn((), turn_index=None)


@pytest.mark.parametrize("session", ["s", None])
async def test_a_turn_that_was_accepted_and_has_said_nothing_begins_anew(
    failover: Failover, session: str | None
) -> None:
    """Its client has the headers, and hears only once that the turn is accepted."""
    if session is not None:
        failover.open_session(session)
    failover.replicas.losses = {"a": behind(1)}
    events = [
        event async for event in failover.events(turn_of(session, logprobs=LOGPROBS, tells_accepted=True))
    ]
    assert [event.says_nothing for event in events] == [True] + [False] * (len(events) - 1)
    assert events[0].turn_index == (None if session is None else 0)
    whole = merge_events(events)
    assert list(whole.token_ids) == WHOLE
    assert (len(whole.input_logprobs), len(whole.logprobs)) == (3, LENGTH)
    assert [name for name, _ in failover.replicas.calls] == ["a", "b"]


async def test_a_session_closed_meanwhile_ends_the_turn_and_does_not_begin_anew(failover: Failover) -> None:
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(3)}
    async with aclosing(failover.events(turn_of("s"))) as events:
        await anext(events)
        failover.cluster.close_session("s")
        *_, last = [event async for event in events]
    assert code_of(last) == "session_not_found"
    assert failover.cluster.sessions() == []


@pytest.mark.parametrize("opened_anew", [False, True])
async def test_a_repeated_call_is_committed_in_no_later_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_anew: bool
) -> None:
    """A call is committed and loses its connection with the answer. The session closes, and the call is sent again. It
    used to be committed in another session of that name, which it opened itself or which another turn had opened
    (simulated seed 1000697 of 1,000 turns). Later its client heard that only after `failover_timeout_s`."""
    async with running_failover(tmp_path) as failover:
        deliver = failover.replicas.turn

        @asynccontextmanager
        async def lose_the_answer(*args: Any) -> AsyncIterator[AsyncIterator[TurnEvent]]:
            monkeypatch.setattr(failover.replicas, "turn", deliver)
            async with deliver(*args) as events:
                assert [event.finish for event in [event async for event in events]][-1] is not None
            failover.cluster.close_session("s")
            if opened_anew:
                failover.cluster.open_session("s", "", None, None)
            raise ReplicaGone("a")
            yield

        monkeypatch.setattr(failover.replicas, "turn", lose_the_answer)
        failover.open_session("s")
        turn = call([5, 6, 7], "s", max_new_tokens=4)
        assert turn.session is not None
        with pytest.raises(ServiceError) as caught:
            await failover.turn(replace(turn, session=replace(turn.session, create=True)))
        assert caught.value.info.code == "session_not_found"
        assert len(failover.replicas.calls) == 1 + 2 * opened_anew, "a remembered owner, then the one that is"
        assert [entry.turns for entry in failover.cluster.sessions()] == [0] * opened_anew


async def test_a_turn_runs_in_the_session_that_was_open_when_it_came(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another front end has closed the session and opened it anew. The owner that this one remembers is gone. The turn
    used to be refused as one of the closed session (simulated seed 661262985)."""
    failover.open_session("s")
    await failover.turn(turn_of("s"))
    assert await failover.rigs[0].host.close("s", 1)
    failover.cluster.open_session("s", "", None, None, "another")
    monkeypatch.setattr(failover.cluster, "_clock", lambda: time.time() + 1.0)
    failover.replicas.dead.add("a")
    assert list((await failover.turn(turn_of("s"))).token_ids) == WHOLE
    [entry] = failover.cluster.sessions()
    assert (entry.open_key, entry.turns) == ("another", 1)


@pytest.mark.parametrize("by_its_first_turn", [True, False])
async def test_a_turn_does_not_go_on_in_a_later_session_of_that_name(
    failover: Failover, by_its_first_turn: bool
) -> None:
    """This holds although it would be a turn with the same number there."""
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(3)}
    async with aclosing(failover.events(turn_of("s"))) as events:
        await anext(events)
        failover.cluster.register_replica(failover.rigs[1].heartbeats.status())
        failover.cluster.report_unreachable("a", True)
        failover.cluster.close_session("s")
        if by_its_first_turn:
            failover.cluster.resolve("s", True, "")
        else:
            failover.cluster.open_session("s", "", None, None, "another")
        *_, last = [event async for event in events]
    assert code_of(last) == "replica_lost"
    [entry] = failover.cluster.sessions()
    assert entry.turns == 0


async def test_a_turn_that_another_one_passed_does_not_go_on(failover: Failover) -> None:
    """What the turn had said was an answer to another history."""
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(3)}
    ends: list[TurnEvent] = []
    async with aclosing(failover.events(turn_of("s"))) as events:
        await anext(events)
        failover.cluster.register_replica(failover.rigs[1].heartbeats.status())
        failover.cluster.report_unreachable("a", True)
        other = await failover.rigs[1].run(call([1, 2], "s"), failover.cluster.resolve("s", False, "").epoch)
        assert other[-1].finish is not None
        ends = [event async for event in events]
    assert code_of(ends[-1]) == "replica_lost"
    assert failover.committed("s") == (1, 10)
    assert (await failover.turn(call([3], "s"))).finish is not None


async def test_a_session_that_moved_under_its_turn_takes_the_turn_along(failover: Failover) -> None:
    """No replica was lost, but another ingress believed so. The old owner's commit is refused, the new owner's is
    accepted."""
    failover.open_session("s")
    async with aclosing(failover.events(turn_of("s"))) as events:
        told = [*(await anext(events)).token_ids]
        failover.cluster.report_unreachable("a", True)
        failover.cluster.resolve("s", False, "")
        async for event in events:
            told += event.token_ids
    assert event.finish is not None
    assert told == WHOLE
    assert [name for name, _ in failover.replicas.calls][-1] == "b"
    assert failover.committed("s") == (1, 3 + LENGTH)


async def test_an_engine_that_stops_in_mid_stream_is_as_good_as_lost(failover: Failover) -> None:
    failover.open_session("s")
    async with aclosing(failover.events(turn_of("s"))) as events:
        told = [*(await anext(events)).token_ids]
        await asyncio.to_thread(failover.rigs[0].engine.stop, 5.0)
        failover.replicas.dead.add("a")  # as Ray Serve does when the health check fails
        async for event in events:
            told += event.token_ids
    assert event.finish is not None
    assert told == WHOLE
    failover.rigs.pop(0)


async def test_nobody_takes_over_in_time(tmp_path: Path) -> None:
    async with running_failover(tmp_path, failover_timeout_s=0.1) as failover:
        failover.open_session("s")
        failover.replicas.losses = {"a": behind(3)}
        failover.replicas.dead.add("b")
        last = await failover.turn(turn_of("s"))
        assert code_of(last) == "no_replica"
        assert list(last.token_ids) == WHOLE[: len(last.token_ids)]
        failover.replicas.dead.clear()
        for rig in failover.rigs:
            await rig.heartbeats.beat()  # the replica hears that it counts as gone, and registers again
        assert (await failover.turn(turn_of("s"))).finish is not None
        await failover.settled()


async def test_who_is_in_mid_stream_waits_for_room(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All turns of the lost replica come at once, perhaps more than the others can take."""
    submit, refused = failover.rigs[1].engine.submit, 0

    def full_at_first(request: GenerateRequest) -> None:
        nonlocal refused
        refused += 1
        if refused < 4:
            raise EngineOverloaded("the queue is full")
        submit(request)

    monkeypatch.setattr(failover.rigs[1].engine, "submit", full_at_first)
    failover.replicas.losses = {"a": behind(3)}
    assert (await failover.turn(turn_of(None))).finish is not None
    assert refused == 4


async def test_what_no_other_replica_takes_is_lost(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica accepted the request, so its client is not told to change it."""
    monkeypatch.setattr(
        failover.rigs[1].engine, "submit", Mock(side_effect=RequestTooLarge("a smaller pool"))
    )
    failover.replicas.losses = {"a": behind(3)}
    assert code_of(await failover.turn(turn_of(None))) == "replica_lost"


async def test_an_abort_reaches_the_replica_that_went_on(failover: Failover) -> None:
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(3)}
    async with aclosing(failover.events(turn_of("s", request_id="mine"))) as events:
        while "a" not in failover.replicas.dead:
            await anext(events)
        assert failover.rigs[1].turns.abort("mine", "") == 1
        *_, last = [event async for event in events]
    assert last.finish is not None
    assert last.finish.reason == "abort"
    assert failover.committed("s") == (0, 0)


@pytest.mark.parametrize("moments", [0, 1, 3, 10, 30, 100])
async def test_a_client_that_leaves_during_the_takeover_leaves_no_trace(
    failover: Failover, moments: int
) -> None:
    """The client leaves while an owner is looked for, while the new owner loads the history, and after the turn went
    on."""
    failover.open_session("s")
    failover.replicas.losses = {"a": behind(3)}
    reading = asyncio.create_task(failover.turn(call([5, 6, 7], "s", max_new_tokens=400)))
    while "a" not in failover.replicas.dead:
        await asyncio.sleep(0)
    for _ in range(moments):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await failover.settled()
    assert reading.cancelled()
    assert failover.committed("s") == (0, 0)
    assert (await failover.turn(turn_of("s"))).completion_tokens == LENGTH


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
        failover = Failover([former, newer], WAIT_S)
        failover.open_session("s")
        failover.replicas.losses = {"a": behind(4)}
        event = await failover.turn(turn_of(session))
        assert event.error is not None
        assert (event.error.status, event.error.code) == (409, "model_changed")
        assert list(event.token_ids) == WHOLE[: len(event.token_ids)]
        assert failover.committed("s") == (0, 0)
        again = await failover.turn(turn_of(session))
        assert (again.error, list(again.token_ids)) == (None, WHOLE)
        await failover.settled()
