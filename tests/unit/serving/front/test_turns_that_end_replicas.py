"""A turn that loses one replica after another goes on a few times, and ends before it has ended all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import EngineStopped
from serving.front import session_owners
from serving.wire.errors import error_event
from serving.wire.turns import ServiceError, TurnCall, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, behind, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call

LENGTH = 30
WHOLE = null_generate([5, 6, 7], LENGTH, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)


def turn_of(session: str | None) -> TurnCall:
    return call([5, 6, 7], session, max_new_tokens=LENGTH)


def code_of(event: TurnEvent) -> str | None:
    return None if event.error is None else event.error.code


async def test_a_turn_goes_on_until_its_fourth_loss(tmp_path: Path) -> None:
    async with running_failover(tmp_path, 5) as failover:
        failover.open_session("s")
        failover.replicas.losses = dict.fromkeys("abcde", behind(4))
        asked = [turn_of("s"), turn_of("s")]
        lost = await failover.turn(asked[0])
        assert code_of(lost) == "too_many_losses", "it may be what kills them"
        assert len(failover.replicas.dead) == 4
        whole = WHOLE
        assert 4 <= len(lost.token_ids) < LENGTH
        assert list(lost.token_ids) == whole[: len(lost.token_ids)]
        failover.replicas.losses.clear()
        assert list((await failover.turn(asked[1])).token_ids) == whole
        assert failover.committed("s") == (1, 3 + LENGTH)
        await failover.settled()


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_that_kills_its_replicas_ends_before_the_cluster_does(
    tmp_path: Path, session: str | None, streamed: bool
) -> None:
    """It used to be given to one replica after another for `failover_timeout_s`, if none got to its first token."""
    async with running_failover(tmp_path, 6) as failover:
        if session is not None:
            failover.open_session(session)
        failover.replicas.losses = dict.fromkeys("abcdef", behind(int(streamed)))
        asked = replace(turn_of(session), tells_accepted=streamed)
        if streamed:
            assert code_of(await failover.turn(asked)) == "too_many_losses"
        else:
            with pytest.raises(ServiceError) as caught:
                await failover.turn(asked)
            assert caught.value.info.code == "too_many_losses"
        assert len(failover.replicas.dead) == 4
        await failover.settled()


async def test_replicas_that_a_turn_never_reached_do_not_count(tmp_path: Path) -> None:
    """Those of a node that is gone: the controller knows of each only when somebody has tried it."""
    async with running_failover(tmp_path, 6) as failover:
        failover.open_session("s")
        failover.replicas.dead.update("abcde")
        assert list((await failover.turn(turn_of("s"))).token_ids) == WHOLE
        await failover.settled()


async def test_an_engine_that_says_again_and_again_that_it_stopped_counts_once(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions move when the controller has heard of it, which may take some tries."""
    deliver, refusals = failover.replicas.turn, iter(range(6))

    async def stopped() -> AsyncIterator[TurnEvent]:
        yield error_event(EngineStopped("the engine died"))

    @asynccontextmanager
    async def refuse_at_first(*args: Any) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        if next(refusals, None) is not None:
            yield stopped()
        else:
            async with deliver(*args) as events:
                yield events

    monkeypatch.setattr(failover.replicas, "turn", refuse_at_first)
    failover.open_session("s")
    assert list((await failover.turn(turn_of("s"))).token_ids) == WHOLE
