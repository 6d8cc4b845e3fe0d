"""However two attempts at a turn cut it into events, the client gets each part of the turn once."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from engine.api import TokenLogprob
from serving.front.turn_progress import TurnProgress
from serving.wire.turn_events import merge_events, split_event
from serving.wire.turns import ErrorInfo, ResumedTurn, TextLogprob, TurnEvent, TurnFinish

LENGTH = 12
INPUTS = 7


def entry(token_id: int) -> TextLogprob:
    return TextLogprob(TokenLogprob(token_id, -1.0), f"<{token_id}>")


def parts(rng: random.Random, *, logprobs: bool, finish: TurnFinish) -> list[TurnEvent]:
    """A turn cut at random: its prompt's log-probabilities, its tokens, its end. Some events are cut further."""
    events = []
    at = 0
    while logprobs and at < INPUTS:
        size = rng.randint(1, 4)
        events.append(TurnEvent(input_logprobs=tuple(map(entry, range(INPUTS)[at : at + size]))))
        at += size
    at = 0
    while at < LENGTH:
        tokens = tuple(range(100, 100 + LENGTH)[at : at + rng.randint(1, 5)])
        event = TurnEvent(
            text="".join(chr(97 + token - 100) for token in tokens),
            token_ids=tokens,
            logprobs=tuple(map(entry, tokens)) if logprobs else (),
        )
        events += split_event(event, rng.randint(1, 6))
        at += len(tokens)
    return [*events, TurnEvent(finish=finish)]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_each_part_is_sent_once(seed: int, logprobs: bool) -> None:
    rng = random.Random(seed)
    progress, sent = TurnProgress(), []
    end = TurnFinish("length")
    for _ in range(rng.randint(1, 3)):
        attempt = parts(rng, logprobs=logprobs, finish=end)
        for event in attempt[: rng.randrange(len(attempt))]:
            unsent = progress.unsent(replace(event, turn_index=4))
            sent += [] if unsent is None else [unsent]
        resumed = progress.begin_again()
        if sent:
            assert resumed.turn_index == 4
        known = resumed.token_ids
        assert known == tuple(range(100, 100 + len(known)))
        # The log-probabilities that a client has seen belong to the resumed tokens.
        assert [each.token.token_id for each in resumed.logprobs] == (list(known) if logprobs else [])
        assert len(resumed.input_logprobs) == (INPUTS if logprobs and known else 0)
    sent += filter(None, map(progress.unsent, parts(rng, logprobs=logprobs, finish=end)))
    whole = parts(rng, logprobs=logprobs, finish=end)
    assert replace(merge_events(sent), turn_index=None) == merge_events(whole)


def test_what_says_nothing_new_is_not_passed_on() -> None:
    progress = TurnProgress()
    event = TurnEvent(text="ab", token_ids=(1, 2), turn_index=0)
    assert progress.unsent(event) is event
    assert progress.begin_again() == ResumedTurn((1, 2), turn_index=0)
    assert progress.unsent(TurnEvent(text="a", token_ids=(1,))) is None
    assert progress.unsent(TurnEvent(text="b", token_ids=(2, 3), completion_tokens=3)) == TurnEvent(
        token_ids=(3,), completion_tokens=3
    )
    error = TurnEvent(error=ErrorInfo(500, "x", "y"))
    assert progress.unsent(error) == error


@pytest.mark.parametrize("replayed", [False, True])
def test_only_who_asked_twice_gets_a_replay(replayed: bool) -> None:
    """It is no replay if the log only ends a turn that this call began. It is one if the whole answer came from the
    log."""
    progress = TurnProgress()
    progress.unsent(TurnEvent(text="a", token_ids=(1,), turn_index=3, replayed=replayed))
    progress.begin_again()
    end = progress.unsent(
        TurnEvent(text="a", token_ids=(1,), finish=TurnFinish("stop"), turn_index=3, replayed=True)
    )
    assert end is not None
    assert end.replayed is replayed
