"""Deltas become events with nothing lost. Drafts count in the usage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import Finish, FinishReason, TokenDelta, TokenLogprob
from engine.settings import SpeculationSettings
from serving.front.api.openai.replies import UsageCounter
from serving.front.api.reply_json import reply_json
from serving.front.http import create_http_app
from serving.replica.live_turn import EventMaker, LiveTurn
from serving.replica.mailbox import Mailbox
from serving.replica.replay import MOST_LOGPROBS, decode_result, encode_result
from serving.text.output_text import OutputText
from serving.watch.metrics import ReplicaMetrics
from serving.wire.turn_events import merge_events
from serving.wire.turns import ResumedTurn, TextLogprob, TurnEvent, TurnFinish
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.engine_figures import stats
from tests.unit.serving.local_service import LocalService, client_of, small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE, call, running_rig, tokens_of

LENGTH = Finish(FinishReason.LENGTH)


def delta(index: int, *, finish: Finish | None = None, tokens: tuple[int, ...] = ()) -> TokenDelta:
    tokens = tokens or (300 + index,)
    logprobs = tuple(TokenLogprob(token, -1.0) for token in tokens)
    return TokenDelta("r", tokens, 5, 2, index + 1, logprobs, finish=finish, draft_tokens=2 * index)


class Rig:
    """A turn and the events that it has emitted."""

    def __init__(self) -> None:
        text = small_text()
        seconds = iter(range(1000))
        self.event_maker = EventMaker(text, ReplicaMetrics("a", stats), lambda: float(next(seconds)))
        self.events: list[TurnEvent] = []
        self.live = LiveTurn(call([1]), "r", None, [1], self.events.append, text.output_text(), 0.0)

    def take(self, *deltas: TokenDelta) -> TurnEvent:
        """Takes the deltas and returns their events joined into one."""
        del self.events[:]
        for each in deltas:
            self.event_maker.take(self.live, each)
        return merge_events(self.events)


def test_each_delta_is_an_event() -> None:
    rig = Rig()
    event = rig.take(*[delta(index) for index in range(5)])
    assert event.token_ids == tuple(range(300, 305)) == tuple(rig.live.output_tokens)
    assert [entry.token.token_id for entry in event.logprobs] == list(event.token_ids)
    assert (event.completion_tokens, event.draft_tokens) == (5, 8)
    assert rig.live.finish is None


def test_one_that_ends_the_turn_and_one_that_says_nothing() -> None:
    rig = Rig()
    event = rig.take(delta(0), delta(1, finish=LENGTH))
    assert (event.token_ids, event.finish) == ((300, 301), None)
    final = rig.live.final_event(1_700_000_000.5)
    assert (final.token_ids, final.completion_tokens, final.draft_tokens) == ((), 2, 2)
    rig = Rig()
    rig.event_maker.take(rig.live, TokenDelta("r", (), 5, 2, 0, finish=LENGTH))
    assert rig.events == []
    assert (rig.live.finish, rig.live.ended.is_set()) == (LENGTH, True)


def test_a_turn_whose_output_cannot_be_told_ends_in_an_error() -> None:
    """The error occurs while deltas come from the engine. Deltas of other turns must not be lost, and this turn must
    not wait forever."""
    rig = Rig()
    rig.live.output = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        rig.event_maker.take(rig.live, delta(0))
    assert rig.live.finish is not None
    assert rig.live.finish.reason is FinishReason.ERROR


async def test_the_engine_stops_a_turn_whose_output_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to generate to the end, and the session's next turn was refused with 409 turn_in_flight."""

    def push(*_: object) -> str:
        raise RuntimeError("no text")

    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        rig.runner.step_s = 0.05
        with monkeypatch.context() as broken:
            broken.setattr(OutputText, "push", push)
            (*_, failed) = await rig.run(call([1, 2, 3], "s", max_new_tokens=400), epoch)
        assert failed.error is not None
        assert "no text" in failed.error.message
        assert tokens_of(await rig.run(call([4], "s"), epoch)) == null_generate([4], 8, VOCAB_SIZE)
        await rig.settled()
        assert (await rig.pages()).in_flight == 0


async def test_a_delta_that_cannot_be_taken_keeps_no_other_from_being_taken() -> None:
    mailbox, taken = Mailbox(asyncio.get_running_loop()), asyncio.Queue[TokenDelta]()

    def fail(_delta: TokenDelta) -> None:
        raise RuntimeError("this one")

    mailbox.open("bad", fail)
    mailbox.open("r", taken.put_nowait)
    bad = TokenDelta("bad", (1,), 5, 2, 1)
    await asyncio.to_thread(mailbox.deliver, [bad, delta(0), bad, delta(1)])
    assert [await taken.get(), await taken.get()] == [delta(0), delta(1)]


def test_what_is_told_again_takes_no_time_and_has_its_log_probabilities() -> None:
    rig = Rig()
    known = tuple(TextLogprob(TokenLogprob(token, -2.0), b"x") for token in (300, 301))
    rig.live.resumed, rig.live.last_token_s = ResumedTurn((300, 301), known, known[:1]), rig.live.started_s
    event = rig.take(TokenDelta("r", (300, 301), 5, 2, 2), delta(2))
    assert [entry.token.logprob for entry in event.logprobs] == [-2.0, -2.0, -1.0]
    assert event.input_logprobs == known[:1]
    assert rig.live.output_tokens == [300, 301, 302]
    event = rig.take(delta(3))
    assert len(event.logprobs) == 1
    text = rig.event_maker._metrics.render()
    assert 'kedge_ttft_seconds_count{replica="a"} 0.0' in text
    assert 'kedge_inter_token_seconds_count{replica="a"} 2.0' in text


@pytest.mark.parametrize(("proposed", "accepted"), [((0, 0), (0, 0)), ((7, 0), (3, 0)), ((7, 5), (3, 5))])
def test_usage_counts_drafts_over_all_choices(proposed: tuple[int, int], accepted: tuple[int, int]) -> None:
    counter = UsageCounter(2)
    for index in range(2):
        counter.note(index, TurnEvent(draft_tokens=proposed[index], accepted_draft_tokens=accepted[index]))
    usage = json.loads(reply_json(counter.usage()))
    if sum(proposed) == 0:
        assert "completion_tokens_details" not in usage
        return
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": sum(accepted),
        "rejected_prediction_tokens": sum(proposed) - sum(accepted),
    }


def test_answers_logged_before_there_were_drafts() -> None:
    event = TurnEvent(
        text="a", token_ids=(1,), finish=TurnFinish("stop"), draft_tokens=4, accepted_draft_tokens=3
    )
    stored = encode_result(event)
    assert (decode_result(stored).draft_tokens, decode_result(stored).accepted_draft_tokens) == (4, 3)
    fields: dict[str, Any] = json.loads(stored)
    del fields["draft_tokens"], fields["accepted_draft_tokens"]
    old = decode_result(json.dumps(fields).encode())
    assert (old.text, old.draft_tokens, old.accepted_draft_tokens) == ("a", 0, 0)


def test_too_many_log_probabilities_are_not_logged() -> None:
    """Each entry took the replica's loop 4 us. A scored context can have 172,000, which made 4 MB of log for one
    turn."""
    beside = tuple((token_id, -1.5) for token_id in range(20))
    entry = TextLogprob(TokenLogprob(7, -0.5, beside), b"seven", (b"\xff",) * 20)
    most = MOST_LOGPROBS // 21
    whole = TurnEvent(
        text="a", token_ids=(7,), finish=TurnFinish("stop"), logprobs=(entry,), input_logprobs=(entry,) * most
    )
    fitting = replace(whole, input_logprobs=(entry,) * (most - 1))
    assert decode_result(encode_result(fitting)) == replace(fitting, replayed=True)
    assert decode_result(encode_result(whole)) == replace(
        whole, logprobs=(), input_logprobs=(), replayed=True
    )


async def test_drafts_reach_both_protocols(tmp_path: Path) -> None:
    """The stand-in model hardly ever repeats earlier tokens, so the proposer makes drafts and the model rejects
    them."""
    speculation = SpeculationSettings("ngram", max_draft_tokens=4, ngram_size=1, row_cost=0.0)
    prompt = list(range(1, 450))
    async with running_rig(tmp_path, text=small_text(), speculation=speculation) as rig:
        assert tokens_of(await rig.run(call(prompt, max_new_tokens=12))) == null_generate(
            prompt, 12, VOCAB_SIZE
        )
        service = LocalService(rig)
        async with client_of(create_http_app(service)) as client:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            sampling = {"temperature": 0, "max_new_tokens": 12}
            reply = await client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
            meta = reply.json()["meta_info"]
    counted = rig.engine.stats()
    assert counted.draft_tokens > 0
    drafts = usage["completion_tokens_details"]
    assert drafts["accepted_prediction_tokens"] + drafts["rejected_prediction_tokens"] > 0
    assert meta["spec_draft_token_num"] > 0
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]
