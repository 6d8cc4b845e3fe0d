"""The digest of a request, by which a retry is known. It is in the log, so it outlives the version that made it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from controllers.records import COUNTED_KEY
from controllers.session import TRIED_AGAIN_WITHIN_S
from engine.api import LogprobParams, SamplingParams
from serving.replica.turn_request import RequestBuilder
from serving.wire import turns
from serving.wire.turns import OutputConstraint, Said, SessionTurn, TokenPrompt, TurnCall
from tests.unit.serving.replica_rig import Rig, call, tokens_of

MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "hi \ud800", "parts": [1, 2.5, None, True, {"a": []}]},
)


class ChatPrompt(turns.ChatPrompt, frozen=True, tag="chat"):
    added_by_the_next_version: bool = False


class NextTokenPrompt(TokenPrompt, frozen=True, tag="tokens"):
    added_by_the_next_version: tuple[int, ...] = ()


class NextConstraint(OutputConstraint, frozen=True):
    added_by_the_next_version: str | None = None


@dataclass(frozen=True, slots=True)
class NextSampling(SamplingParams):
    added_by_the_next_version: float = 1.0


@dataclass(frozen=True, slots=True)
class NextLogprobs(LogprobParams):
    added_by_the_next_version: int = 0


class NextCall(TurnCall, frozen=True):
    added_by_the_next_version: int = 0


THIS_VERSION = (turns.ChatPrompt, SamplingParams, LogprobParams, OutputConstraint, TurnCall)
NEXT_VERSION = (ChatPrompt, NextSampling, NextLogprobs, NextConstraint, NextCall)


def asked(kinds: tuple[Any, ...], **prompt_options: Any) -> TurnCall:
    """A request that uses something of every record, made of records of these kinds."""
    prompt, sampling, logprobs, constraint, turn_call = kinds
    made: TurnCall = turn_call(
        "r",
        prompt(MESSAGES, {"thinking": True}, said=(Said(1, b"\x00\xff"),), **prompt_options),
        sampling(temperature=0.5, logit_bias={7: 1.0, 3: -1.0}, stop_token_ids=frozenset({9, 1, 300})),
        stop=("x",),
        logprobs=logprobs(output=True),
        constraint=constraint("regex", "a*"),
        session=SessionTurn("s", idempotency_key="k"),
    )
    return made


@pytest.fixture
def builder(rig: Rig) -> RequestBuilder:
    return rig.builder


async def test_records_that_gain_a_field_leave_the_digest_as_it_is(builder: RequestBuilder) -> None:
    """The digest was of the records' repr. An update that added a field made each retry across it another request."""
    assert await builder.digests(asked(NEXT_VERSION)) == await builder.digests(asked(THIS_VERSION))


async def test_a_field_that_a_version_added_counts_where_it_is_used(builder: RequestBuilder) -> None:
    used = asked(NEXT_VERSION, added_by_the_next_version=True)
    assert await builder.digests(used) != await builder.digests(asked(NEXT_VERSION))


async def test_changing_this_digest_is_changing_the_wire(builder: RequestBuilder) -> None:
    """Logs have digests like these. If they change, no retry across the update is known."""
    digest, _ = await builder.digests(asked(THIS_VERSION))
    assert digest == "cdb50db0bdff00c07ce0e5b961978c5ba050fd20b6793d6b11ded880e04b0634"
    digest, _ = await builder.digests(call([1, 2, 3], "s", key="k"))
    assert digest == "012ab51d774d0cfab49207358a11f849dec2eaef491325e3ed02916f6e2829e6"


async def test_a_retry_without_a_key_runs_once_across_an_update(rig: Rig) -> None:
    """It ran a second time: P3."""
    epoch = rig.open_session("s")
    turn = SessionTurn("s", idempotency_key=COUNTED_KEY + "first", retries=0)
    first = await rig.run(replace(call([1, 2, 3]), session=turn), epoch)
    turn = SessionTurn("s", idempotency_key=COUNTED_KEY + "again", retries=1)
    again = await rig.run(replace(call([1, 2, 3]), prompt=NextTokenPrompt((1, 2, 3)), session=turn), epoch)
    assert again[-1].replayed
    assert tokens_of(again) == tokens_of(first)
    (status,) = rig.controller.cluster.sessions()
    assert status.turns == 1


async def test_an_equal_turn_that_is_long_past_is_not_the_one_tried_before_also_once_it_is_loaded(
    rig: Rig,
) -> None:
    """After a move its answer was told again: the time began when the session was loaded."""
    epoch = rig.open_session("s")
    turn = SessionTurn("s", idempotency_key=COUNTED_KEY + "yesterday", retries=0)
    await rig.run(replace(call([1]), session=turn), epoch)
    for later_s, replayed in ((TRIED_AGAIN_WITHIN_S / 2, True), (2 * TRIED_AGAIN_WITHIN_S, False)):
        rig.sessions.drop("s")  # the next turn loads it from the log, as a next owner does
        now_s = time.time() + later_s
        rig.unix_clock = lambda now_s=now_s: now_s
        turn = SessionTurn("s", idempotency_key=COUNTED_KEY + "today", retries=1)
        again = await rig.run(replace(call([1]), session=turn), epoch)
        assert again[-1].replayed is replayed
