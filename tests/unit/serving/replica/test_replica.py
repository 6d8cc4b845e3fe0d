"""Turns on one replica commit whole or leave no trace, whatever happens to the client, the log or the engine."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from controllers.errors import (
    SessionMoved,
    SessionNotFound,
    StaleEpoch,
    StoreError,
)
from controllers.records import ReplicaStatus
from controllers.wire_record import WIRE_VERSION
from engine.api import (
    ConstraintFailed,
    EngineError,
    EngineOverloaded,
    EngineStopped,
    GenerateRequest,
    InvalidRequest,
    StepFailed,
)
from serving.replica import session_host, turn_runner
from serving.replica.engine_answers import ENGINE_TIMEOUT_S
from serving.replica.replica import execution_line
from serving.wire.calls import RewindSession
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import (
    ENDS_AT_ONCE,
    REPLICA_ID,
    VOCAB_SIZE,
    Rig,
    call,
    running_rig,
    tokens_of,
)

KEPT = {"whole": [1, 2], "cut": [3], "after": [4]}


async def test_turns_of_a_session_equal_one_long_request(rig: Rig) -> None:
    epoch = rig.open_session("s")
    history: list[int] = []
    for turn in range(4):
        new = [turn + 1, turn + 2, turn + 3]
        events = await rig.run(call(new, "s"), epoch)
        output = tokens_of(events)
        assert output == null_generate(history + new, 8, VOCAB_SIZE)
        final = events[-1]
        assert final.finish is not None
        assert final.finish.reason == "length"
        assert final.prompt_tokens == len(history) + 3
        assert final.completion_tokens == 8
        if history:
            assert final.cached_tokens in (len(history), len(history) - 1)
        history += new + output
    assert rig.controller.cluster.sessions()[0].tokens == len(history)
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_calls_without_a_session(rig: Rig) -> None:
    results = await asyncio.gather(*(rig.run(call([n, 7, 9], max_new_tokens=20)) for n in range(1, 6)))
    for n, events in enumerate(results, start=1):
        assert tokens_of(events) == null_generate([n, 7, 9], 20, VOCAB_SIZE)
    await rig.books_are_empty()


async def test_second_turn_in_flight_is_refused(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.hold()
    first = asyncio.create_task(rig.run(call([1, 2], "s", max_new_tokens=30), epoch))
    await rig.begun()
    refused = await rig.run(call([3], "s"), epoch)
    assert refused[-1].error is not None
    assert (refused[-1].error.status, refused[-1].error.code) == (409, "turn_in_flight")
    rig.runner.go_on()
    assert tokens_of(await first) == null_generate([1, 2], 30, VOCAB_SIZE)


async def test_a_client_that_leaves_leaves_no_trace(rig: Rig) -> None:
    epoch = rig.open_session("s")
    history = [1, 2, *tokens_of(await rig.run(call([1, 2], "s"), epoch))]
    rig.runner.step_s = 0.01
    events = rig.events(call([5, 6], "s", max_new_tokens=300), epoch)
    await anext(events)
    await events.aclose()
    assert rig.sessions.committed_len("s") == len(history)
    rig.runner.step_s = 0.0
    events = await rig.run(call([7], "s"), epoch)
    assert events[-1].prompt_tokens == len(history) + 1
    assert tokens_of(events) == null_generate([*history, 7], 8, VOCAB_SIZE)
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_a_bug_at_the_end_of_a_turn_keeps_no_session(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn stayed in flight for good: all others were refused, and the session could not be closed."""
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    with monkeypatch.context() as bug:
        bug.setattr(turn_runner, "encode_said", Mock(side_effect=ValueError("a bug")))
        with pytest.raises(ValueError, match="a bug"):
            await rig.turns.run(call([2], "s"), epoch, lambda _event: None)
    events = await rig.run(call([3], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 3], 8, VOCAB_SIZE)
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_cancelled_at_any_moment(rig: Rig) -> None:
    """A turn that is cancelled after any delay was either committed or did not happen. The session goes on."""
    epoch = rig.open_session("s")
    history: list[int] = []
    rig.runner.step_s = 0.001
    for delay_ms in range(0, 30, 2):
        task = asyncio.create_task(rig.run(call([9, delay_ms], "s"), epoch))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        await asyncio.wait([task])
        await rig.settled()
        expected = [*history, 9, delay_ms, *null_generate([*history, 9, delay_ms], 8, VOCAB_SIZE)]
        length = rig.sessions.committed_len("s") if rig.sessions.knows("s", epoch) else 0
        assert length in (len(history), len(expected))
        history = expected if length == len(expected) else history
    events = await rig.run(call([1], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 1], 8, VOCAB_SIZE)
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_abort_request_ends_with_abort(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.hold()
    task = asyncio.create_task(rig.run(call([1], "s", max_new_tokens=300, request_id="mine"), epoch))
    await rig.begun()
    assert rig.turns.abort("other", "") == 0
    assert rig.turns.abort("mine", "") == 1
    rig.runner.go_on()
    final = (await task)[-1]
    assert final.finish is not None
    assert final.finish.reason == "abort"
    assert rig.sessions.committed_len("s") == 0


async def test_retried_turn_runs_once(rig: Rig) -> None:
    epoch = rig.open_session("s")
    first = await rig.run(call([1, 2], "s", key="k"), epoch)
    again = await rig.run(call([1, 2], "s", key="k"), epoch)
    assert tokens_of(again) == tokens_of(first)
    assert again[-1].finish is not None
    assert again[-1].replayed
    assert rig.sessions.committed_len("s") == 10
    other = await rig.run(call([1, 3], "s", key="k"), epoch)
    assert other[-1].error is not None
    assert other[-1].error.code == "idempotency_conflict"


async def test_a_key_whose_answer_was_rewound_never_runs_again_wherever_its_session_is(rig: Rig) -> None:
    """The answer was still told, here and after a takeover, although a rewind had deleted it."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2], "s", key="whole"), epoch)
    await rig.run(call([3], "s", key="cut"), epoch)
    await rig.empty_turns.rewind(RewindSession("s", epoch, 11))
    await rig.run(call([4], "s", key="after"), epoch)
    for _ in range(2):
        answers = {key: (await rig.run(call(new, "s", key=key), epoch))[-1] for key, new in KEPT.items()}
        assert answers["whole"].replayed
        assert answers["after"].replayed
        assert answers["cut"].error is not None
        assert (answers["cut"].error.status, answers["cut"].error.code) == (409, "idempotency_conflict")
        assert "was deleted" in answers["cut"].error.message
        assert rig.sessions.committed_len("s") == 20
        rig.sessions.drop("s")  # the next turn loads it from the log, as a next owner does


@pytest.mark.parametrize("other", [{"skip_special_tokens": False}, {"trim_stop": False}, {"stop": ("x",)}])
async def test_a_key_stands_for_everything_that_shapes_an_answer(rig: Rig, other: dict[str, Any]) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([1, 2], "s"), epoch)
    await rig.run(call([3], "s", key="k"), epoch)
    refused = await rig.run(call([3], "s", key="k", **other), epoch)
    assert refused[-1].error is not None
    assert refused[-1].error.code == "idempotency_conflict"


async def test_session_that_moved_during_the_turn_is_dropped(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.controller.failures["commit_turn"] = [StaleEpoch("moved")]
    failed = await rig.run(call([2], "s"), epoch)
    assert failed[-1].error is not None
    assert failed[-1].error.code == "stale_epoch"
    assert not rig.sessions.knows("s", epoch)
    await rig.books_are_empty()


async def test_a_close_is_carried_out_though_the_turn_it_waited_for_fails(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.hold()
    task = asyncio.create_task(rig.run(call([1], "s"), epoch))
    await rig.begun()
    assert await rig.host.close("s", 1)
    rig.controller.failures["commit_turn"] = [StaleEpoch("moved")]
    rig.runner.go_on()
    failed = (await task)[-1].error
    assert failed is not None
    assert failed.code == "stale_epoch"
    assert rig.controller.cluster.sessions() == []
    await rig.books_are_empty()


async def test_former_owner_refuses(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([1], "s"), epoch)
    cluster = rig.controller.cluster
    cluster.register_replica(ReplicaStatus("replica-b", 1000, 1000))
    cluster.report_unreachable(REPLICA_ID, True)
    moved = cluster.resolve("s", False, "")
    assert moved.replica_id == "replica-b"
    refused = await rig.run(call([2], "s"), moved.epoch)
    assert refused[-1].error is not None
    assert refused[-1].error.code == "stale_epoch"
    await rig.heartbeats.beat()
    assert rig.sessions.epoch("s") is None
    await rig.books_are_empty()


async def test_adopted_session_continues_exactly(rig: Rig) -> None:
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    await rig.host.release("s")
    events = await rig.run(call([2], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 2], 8, VOCAB_SIZE)


async def test_close_during_a_turn_waits_for_its_end(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.hold()
    task = asyncio.create_task(rig.run(call([1], "s", max_new_tokens=20), epoch))
    await rig.begun()
    assert await rig.host.close("s", 1)
    assert rig.controller.cluster.sessions() != []
    refused = await rig.run(call([2], "s"), epoch)
    assert refused[-1].error is not None
    assert refused[-1].error.code == "session_closing"
    rig.runner.go_on()
    assert tokens_of(await task) == null_generate([1], 20, VOCAB_SIZE)
    await rig.settled()
    assert rig.controller.cluster.sessions() == []
    await rig.books_are_empty()


async def test_idle_sessions_end_but_never_during_a_turn(tmp_path: Path) -> None:
    async with running_rig(tmp_path, settings=ENDS_AT_ONCE) as rig:
        epoch = rig.open_session("s")
        rig.runner.hold()
        task = asyncio.create_task(rig.run(call([1], "s", max_new_tokens=20), epoch))
        await rig.begun()
        await rig.host.expire_idle()
        rig.runner.go_on()
        assert tokens_of(await task) == null_generate([1], 20, VOCAB_SIZE)
        assert rig.controller.cluster.sessions() != []
        await rig.host.expire_idle()
        assert rig.controller.cluster.sessions() == []
        await rig.books_are_empty()


async def test_idle_sessions_end_together(tmp_path: Path) -> None:
    """Each waits for the controller and for a step of the engine. One after the other they ended slower than clients
    may open them."""
    async with running_rig(tmp_path, settings=ENDS_AT_ONCE) as rig:
        names = [f"s{index}" for index in range(5)]
        for name in names:
            await rig.run(call([1], name), rig.open_session(name))
        rig.controller.gate.clear()
        ending = asyncio.create_task(rig.host.expire_idle())
        await rig.asked_controller(len(names))
        rig.controller.gate.set()
        await ending
        assert rig.controller.cluster.sessions() == []
        await rig.books_are_empty()


async def test_a_session_that_is_used_while_others_end_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_host, "ENDS_AT_ONCE", 1)
    async with running_rig(tmp_path, settings=ENDS_AT_ONCE) as rig:
        epochs = {name: rig.open_session(name) for name in ("idle", "used")}
        for name, epoch in epochs.items():
            await rig.run(call([1], name), epoch)
        rig.controller.gate.clear()
        ending = asyncio.create_task(rig.host.expire_idle())
        await asyncio.to_thread(rig.engine.audit().result, 5.0)
        rig.runner.hold()
        task = asyncio.create_task(rig.run(call([2], "used"), epochs["used"]))
        await rig.begun()
        rig.controller.gate.set()
        await ending
        rig.runner.go_on()
        assert (await task)[-1].finish is not None
        assert [entry.session_id for entry in rig.controller.cluster.sessions()] == ["used"]


async def test_neither_a_rewind_nor_a_turn_after_it_waits_for_the_engine_to_cut_kv(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    with monkeypatch.context() as patched:
        patched.setattr(rig.engine, "rewind_session", lambda *_: Future())
        async with asyncio.timeout(ENGINE_TIMEOUT_S / 2):  # the engine never does, and would be waited for
            await rig.empty_turns.rewind(RewindSession("s", epoch, 3))
            events = await rig.run(call([2], "s"), epoch)
    assert tokens_of(events) == null_generate([*history[:3], 2], 8, VOCAB_SIZE)
    assert events[-1].cached_tokens == 3


async def test_capacity_limits_the_turn(rig: Rig) -> None:
    epoch = rig.open_session("s", capacity_tokens=12)
    events = await rig.run(call([1, 2], "s", max_new_tokens=None), epoch)
    assert len(tokens_of(events)) == 10
    full = await rig.run(call([3], "s"), epoch)
    assert full[-1].error is not None
    assert full[-1].error.code == "session_capacity_exceeded"


async def test_only_who_asks_for_more_than_the_pool_holds_is_refused(tmp_path: Path) -> None:
    async with running_rig(tmp_path, num_pages=5) as rig:
        assert len(tokens_of(await rig.run(call([1, 2], max_new_tokens=None)))) == 18
        for asked, tokens in ((19, [1, 2]), (None, list(range(1, 22)))):
            refused = (await rig.run(call(tokens, max_new_tokens=asked)))[-1].error
            assert refused is not None
            assert refused.code == "request_too_large"
            assert "21 tokens need 6 KV pages, the whole pool has 5" in refused.message


@pytest.mark.parametrize("tokens", [[], [VOCAB_SIZE], [-1], list(range(1, 600))])
async def test_bad_input_is_a_4xx_and_changes_nothing(rig: Rig, tokens: list[int]) -> None:
    epoch = rig.open_session("s")
    before = await rig.pages()
    events = await rig.run(call(tokens, "s"), epoch)
    assert events[-1].error is not None
    assert 400 <= events[-1].error.status < 500
    assert events[-1].error.param is not None
    assert rig.sessions.committed_len("s") == 0
    assert await rig.pages() == before
    assert (await rig.run(call([1], "s"), epoch))[-1].finish is not None


async def test_engine_that_dies_answers_every_request(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.step_s = 0.01
    task = asyncio.create_task(rig.run(call([1], "s", max_new_tokens=300), epoch))
    await rig.begun()
    await asyncio.to_thread(rig.engine.stop, 5.0)
    final = (await task)[-1]
    assert final.error is not None
    assert final.error.code == "engine_stopped"


async def test_outcomes_tell_faults_of_clients_from_those_of_the_engine(rig: Rig) -> None:
    """An engine that refuses everything must not look like clients that send bad requests."""
    epoch = rig.open_session("s")
    await rig.run(call([], "s"), epoch)
    assert rig.figure("kedge_turns_total", outcome="refused") == 1
    rig.runner.step_s = 0.01
    begun = asyncio.create_task(rig.run(call([1], "s", max_new_tokens=300), epoch))
    await rig.begun()
    await asyncio.to_thread(rig.engine.stop, 5.0)
    await begun
    assert rig.figure("kedge_turns_total", outcome="unavailable") == 1
    for number in range(3):
        (last,) = await rig.run(call([1], "s", request_id=f"r{number}"), epoch)
        assert last.error is not None
        assert last.error.status == 503
    assert rig.figure("kedge_turns_total", outcome="unavailable") == 4
    assert rig.figure("kedge_turns_total", outcome="refused") == 1
    assert rig.figure("kedge_turns_total", outcome="error") == 0


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (InvalidRequest("no"), "refused"),
        (ConstraintFailed("no"), "refused"),
        (SessionNotFound("no"), "refused"),
        (EngineOverloaded("full"), "overloaded"),
        (EngineStopped("gone"), "unavailable"),
        (StoreError("gone"), "unavailable"),
        (StepFailed("broken"), "error"),
        (EngineError("broken"), "error"),
        (SessionMoved("on"), "moved"),
        (StaleEpoch("old"), "stale"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_each_refusal_of_the_engine_has_its_outcome(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, failure: Exception, outcome: str
) -> None:
    def refuse(_request: GenerateRequest) -> None:
        raise failure

    monkeypatch.setattr(rig.engine, "submit", refuse)
    await rig.run(call([1]))
    assert rig.figure("kedge_turns_total", outcome=outcome) == 1


async def test_what_nobody_expected_is_a_fault_of_ours(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that ended in unexpected errors used to count nowhere. A replica with only such turns raised no alert."""

    def fail(_request: GenerateRequest) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(rig.engine, "submit", fail)
    with pytest.raises(KeyError):
        await rig.turns.run(call([1]), None, lambda _: None)
    assert rig.figure("kedge_turns_total", outcome="error") == 1


async def test_a_turn_has_its_times_and_its_tokens(rig: Rig) -> None:
    await rig.run(call([1, 2, 3], max_new_tokens=5))
    assert rig.figure("kedge_prompt_tokens_sum") == 3
    assert rig.figure("kedge_output_tokens_sum") == 5
    assert rig.figure("kedge_finished_turns_total", reason="length") == 1
    parts = ("kedge_queue_seconds", "kedge_prefill_seconds", "kedge_decode_seconds")
    for name in (*parts, "kedge_turn_seconds", "kedge_ttft_seconds"):
        assert rig.figure(f"{name}_count") == 1, name
    total_s = rig.figure("kedge_turn_seconds_sum")
    assert 0 < sum(rig.figure(f"{name}_sum") for name in parts) <= total_s
    assert rig.figure("kedge_commit_seconds_count") == 0, "nothing to commit"


async def test_commits_and_loads_are_timed(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([1], "s"), epoch)
    assert rig.figure("kedge_commit_seconds_count") == 1
    assert rig.figure("kedge_session_load_seconds_count") == 1
    await rig.run(call([2], "s"), epoch)
    assert rig.figure("kedge_session_load_seconds_count") == 1, "it is held"


async def test_metrics_tell_outcomes_and_pages(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([1], "s"), epoch)
    await rig.run(call([], "s"), epoch)
    assert rig.figure("kedge_turns_total", outcome="committed") == 1
    assert rig.figure("kedge_turns_total", outcome="refused") == 1
    assert rig.figure("kedge_kv_pages", account="leaked", pool="full") == 0
    assert rig.figure("kedge_ttft_seconds_count") == 1


async def test_figures_say_what_it_runs_on(rig: Rig) -> None:
    await rig.run(call([1, 2, 3]))
    figures = rig.describe()
    assert figures["execution"] == rig.runner.describe()
    assert figures["execution"]["runner"] == "null"
    assert (figures["replica_id"], figures["live_turns"], figures["links"]) == (REPLICA_ID, 0, 0)
    assert json.loads(json.dumps(figures)) == figures
    assert "runner null" in execution_line(rig.engine)


async def test_a_front_end_two_versions_away_is_refused_by_name(tmp_path: Path) -> None:
    """Such a front end's call could be misread."""
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        for version in (WIRE_VERSION - 2, WIRE_VERSION + 2):
            (event,) = await rig.run(replace(call([1], "s"), wire_version=version), epoch)
            assert event.error is not None
            assert (event.error.status, event.error.code) == (503, "version_mismatch")
        for version in (WIRE_VERSION - 1, WIRE_VERSION + 1):
            assert tokens_of(await rig.run(replace(call([1], "s"), wire_version=version), epoch))
