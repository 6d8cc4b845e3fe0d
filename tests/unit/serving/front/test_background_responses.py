"""Responses that are made after their requests were answered, by one front end or several, over real HTTP on one
replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.front.api.responses import background as responses_background
from serving.front.api.responses.background import BackgroundResponses
from serving.front.api.responses.store import note_begun
from serving.front.http import create_http_app
from serving.keys import KeyRing
from serving.wire.turns import SessionTurn
from tests.unit.serving.local_service import LocalService, http_server, local_service
from tests.unit.serving.responses_client import GREEDY, expected, said, user
from tests.unit.serving.sdk_clients import openai_at

ENDED = ("completed", "incomplete", "failed", "cancelled")
RING = KeyRing({"KEDGE_API_KEYS": "key-a=tenant-a,key-b=tenant-b"})
WITHIN_S = 20.0
FEW = 2
SLOW_S = 0.2
"""How long a step takes. An answer takes a second. A left turn is over within a step."""


class FrontEnd:
    """One of several front ends, with its client. A `silent` front end does not answer the others."""

    def __init__(self, cluster: FrontEnds) -> None:
        self.cluster = cluster
        self.silent = False
        self.background = BackgroundResponses(cluster, most=FEW)
        self.client: openai.AsyncOpenAI
        self.others: openai.AsyncOpenAI

    async def begin(self, text: str = "one", **fields: Any) -> Any:
        return await self.client.responses.create(input=text, background=True, **(GREEDY | fields))

    async def ended(self, response_id: str) -> Any:
        async with asyncio.timeout(WITHIN_S):
            while (response := await self.client.responses.retrieve(response_id)).status not in ENDED:
                await asyncio.sleep(0.01)
        return response

    async def die(self) -> None:
        """Acts as if its process had ended: it writes nothing any more, and its turns are left."""
        self.cluster.members.remove(self)
        running = list(self.background._running.values())
        for each in running:
            each.task.cancel()
            each.work.cancel()
        await asyncio.wait([each.task for each in running] + [each.work for each in running])


class FrontEnds:
    """Stands in for Siblings."""

    def __init__(self, service: LocalService) -> None:
        self.service = service
        self.members: list[FrontEnd] = []

    async def ask(self, method: str, *args: Any) -> list[Any]:
        assert method == "background_response"
        if any(member.silent for member in self.members):
            return []
        *asked, cancel = args
        return [await member.background.here(*asked, cancel=cancel) for member in self.members]


@asynccontextmanager
async def front_ends(directory: Path, count: int) -> AsyncIterator[FrontEnds]:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(local_service(directory))
        cluster = FrontEnds(service)
        for _ in range(count):
            member = FrontEnd(cluster)
            app = create_http_app(service, keys=RING, background=member.background)
            url = await stack.enter_async_context(http_server(app))
            member.client, member.others = [
                await stack.enter_async_context(openai_at(url, key)) for key in ("key-a", "key-b")
            ]
            cluster.members.append(member)
            stack.push_async_callback(member.background.stop, patience_s=0, timeout_s=5)
        stack.callback(service.rig.runner.go_on)
        yield cluster


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    async with front_ends(tmp_path, 1) as cluster:
        yield cluster.members[0]


@pytest.fixture
async def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontEnds]:
    monkeypatch.setattr(responses_background, "NEWCOMER_GRACE_S", 0.0)
    async with front_ends(tmp_path, 2) as cluster:
        yield cluster


async def test_it_is_answered_at_once_and_had_by_its_id(alone: FrontEnd) -> None:
    runner = alone.cluster.service.rig.runner
    runner.hold()
    begun = await alone.begin(metadata={"k": "v"})
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    await runner.held()
    now = await alone.client.responses.retrieve(begun.id)
    assert (now.status, now.metadata) == ("queued", {"k": "v"})
    items = await alone.client.responses.input_items.list(begun.id)
    assert [item.content[0].text for item in items.data] == ["one"]
    runner.go_on()
    response = await alone.ended(begun.id)
    assert (response.status, response.output_text) == ("incomplete", expected([user("one")]))
    assert response.background is True


async def test_one_that_speaks_is_in_progress(alone: FrontEnd) -> None:
    runner = alone.cluster.service.rig.runner
    runner.step_s = 0.2
    begun = await alone.begin()
    seen = set()
    while (response := await alone.client.responses.retrieve(begun.id)).status not in ENDED:
        seen.add(response.status)
        await asyncio.sleep(0.02)
    assert seen == {"queued", "in_progress"}


async def test_they_are_gone_on_from(alone: FrontEnd) -> None:
    items: list[dict[str, Any]] = []
    before = None
    for text, background in (("one", True), ("two", True), ("three", False), ("four", True)):
        items.append(user(text))
        fields: dict[str, Any] = {"background": background, "previous_response_id": before}
        begun = await alone.client.responses.create(input=text, **GREEDY, **fields)
        response = await alone.ended(begun.id)
        assert response.output_text == expected(items)
        items.append(said(response))
        before = response.id
    assert len(alone.cluster.service.cluster.sessions()) == 1, "each was a turn of one session"


async def test_what_has_not_been_completed_is_not_gone_on_from(alone: FrontEnd) -> None:
    alone.cluster.service.rig.runner.step_s = SLOW_S
    begun = await alone.begin()
    for _ in ("while it runs", "once it is cancelled"):
        with pytest.raises(openai.BadRequestError) as caught:
            await alone.begin("two", previous_response_id=begun.id)
        assert caught.value.param == "previous_response_id"
        await alone.client.responses.cancel(begun.id)


async def test_more_than_it_takes_are_refused(alone: FrontEnd) -> None:
    runner = alone.cluster.service.rig.runner
    runner.step_s = SLOW_S
    begun = [await alone.begin() for _ in range(FEW)]
    with pytest.raises(openai.RateLimitError) as caught:
        await alone.begin()
    assert (caught.value.code, caught.value.param) == ("overloaded", "background")
    runner.go_on()
    for response in begun:
        await alone.ended(response.id)
    await alone.ended((await alone.begin()).id)


@pytest.mark.parametrize("other", [False, True])
async def test_it_is_cancelled_from_any_front_end(both: FrontEnds, other: bool) -> None:
    both.service.rig.runner.step_s = SLOW_S
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.begun()
    asked = two if other else one
    cancelled = await asked.client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.id) == ("cancelled", begun.id)
    for member in both.members:
        assert await member.client.responses.retrieve(begun.id) == cancelled
        assert await member.client.responses.cancel(begun.id) == cancelled
    both.service.rig.runner.go_on()
    await both.service.rig.settled()


async def test_what_it_had_said_is_kept_when_it_is_cancelled(alone: FrontEnd) -> None:
    alone.cluster.service.rig.runner.step_s = 0.1
    begun = await alone.begin(max_output_tokens=200)
    turn = alone.background.running_turn(begun.id, "tenant-a")
    assert turn is not None
    while not turn.text():
        await asyncio.sleep(0.01)
    cancelled = await alone.client.responses.cancel(begun.id)
    assert (cancelled.status, bool(cancelled.output_text)) == ("cancelled", True)
    assert await alone.client.responses.retrieve(begun.id) == cancelled


async def test_a_cancel_that_comes_as_it_ends_has_one_outcome(alone: FrontEnd) -> None:
    alone.cluster.service.rig.runner.step_s = 0.02
    outcomes = set()
    for number in range(12):
        begun = await alone.begin(str(number))
        await asyncio.sleep(0.03 * number)
        cancelled = await alone.client.responses.cancel(begun.id)
        assert cancelled.status in ("cancelled", "incomplete")
        assert await alone.client.responses.retrieve(begun.id) == cancelled
        if cancelled.status == "incomplete":
            assert cancelled.output_text == expected([user(str(number))])
        outcomes.add(cancelled.status)
    assert outcomes == {"cancelled", "incomplete"}


async def test_only_one_in_the_background_is_cancelled(alone: FrontEnd) -> None:
    response = await alone.client.responses.create(input="one", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="background"):
        await alone.client.responses.cancel(response.id)


async def test_any_front_end_tells_how_far_it_is(both: FrontEnds) -> None:
    both.service.rig.runner.hold()
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.runner.held()
    assert (await two.client.responses.retrieve(begun.id)).status == "queued"
    one.silent = True
    assert (await two.client.responses.retrieve(begun.id)).status == "in_progress", "nobody says otherwise"
    one.silent = False
    both.service.rig.runner.go_on()
    assert await two.ended(begun.id) == await one.ended(begun.id)


async def test_one_whose_front_end_died_has_failed(both: FrontEnds) -> None:
    both.service.rig.runner.step_s = SLOW_S
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.begun()
    await one.die()
    both.service.rig.runner.go_on()
    response = await two.ended(begun.id)
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert "front end" in response.error.message
    assert await two.client.responses.retrieve(begun.id) == response
    assert await two.client.responses.cancel(begun.id) == response


async def test_one_whose_turn_still_runs_at_its_replica_is_not_given_up(both: FrontEnds) -> None:
    """The replica has not heard yet that the front end is gone, and may still commit the turn."""
    both.service.rig.runner.hold()
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.runner.held()
    both.members.remove(one)
    assert (await two.client.responses.retrieve(begun.id)).status == "in_progress"
    both.service.rig.runner.go_on()
    response = await two.ended(begun.id)
    assert response.output_text == expected([user("one")])


async def test_a_lost_one_is_cancelled(both: FrontEnds) -> None:
    both.service.rig.runner.step_s = SLOW_S
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.begun()
    await one.die()
    both.service.rig.runner.go_on()
    assert (await two.client.responses.cancel(begun.id)).status == "cancelled"
    assert (await two.client.responses.retrieve(begun.id)).status == "cancelled"


async def test_it_is_not_given_up_where_its_front_end_may_be_unknown(tmp_path: Path) -> None:
    async with front_ends(tmp_path, 2) as cluster:
        cluster.service.rig.runner.hold()
        one, two = cluster.members
        begun = await one.begin()
        cluster.members.remove(one)
        assert (await two.client.responses.retrieve(begun.id)).status == "queued"
        cluster.service.rig.runner.go_on()
        assert (await two.ended(begun.id)).output_text == expected([user("one")])


async def test_a_front_end_that_stops_says_what_it_broke_off(both: FrontEnds) -> None:
    both.service.rig.runner.step_s = SLOW_S
    one, two = both.members
    begun = await one.begin()
    await both.service.rig.begun()
    await one.background.stop(patience_s=0.01, timeout_s=WITHIN_S)
    assert not one.background._running
    assert (await two.client.responses.retrieve(begun.id)).status == "failed"


async def test_a_front_end_that_stops_lets_them_end(alone: FrontEnd) -> None:
    begun = await alone.begin()
    await alone.background.stop(patience_s=WITHIN_S, timeout_s=0)
    assert (await alone.client.responses.retrieve(begun.id)).output_text == expected([user("one")])


async def test_a_turn_that_is_refused_has_failed(alone: FrontEnd) -> None:
    begun = await alone.begin("word " * 2000)
    response = await alone.ended(begun.id)
    assert (response.status, response.error.code) == ("failed", "context_length_exceeded")


async def test_it_is_deleted(alone: FrontEnd) -> None:
    runner = alone.cluster.service.rig.runner
    runner.step_s = SLOW_S
    begun = await alone.begin()
    await alone.cluster.service.rig.begun()
    await alone.client.responses.delete(begun.id)
    runner.go_on()
    with pytest.raises(openai.NotFoundError):
        await alone.client.responses.retrieve(begun.id)
    first = await alone.ended((await alone.begin()).id)
    second = await alone.ended((await alone.begin(previous_response_id=first.id)).id)
    await alone.client.responses.delete(first.id)
    third = await alone.client.responses.retrieve(second.id)
    assert third.id == second.id
    with pytest.raises(openai.NotFoundError):
        await alone.client.responses.retrieve(first.id)
    await alone.client.responses.delete(second.id)
    assert alone.cluster.service.cluster.sessions() == []


async def test_tenants_do_not_see_each_others(alone: FrontEnd) -> None:
    alone.cluster.service.rig.runner.hold()
    begun = await alone.begin()
    theirs = alone.others.responses
    with pytest.raises(openai.NotFoundError):
        await theirs.retrieve(begun.id)
    with pytest.raises(openai.NotFoundError):
        await theirs.cancel(begun.id)
    with pytest.raises(openai.NotFoundError):
        await theirs.delete(begun.id)
    assert (await alone.client.responses.retrieve(begun.id)).status == "queued"


async def test_the_turn_of_one_that_has_begun_has_no_other_place() -> None:
    """Nobody runs it elsewhere, so it waits as long as any turn."""

    class Log:
        async def keep_note(self, *_: object, **__: object) -> None:
            pass

    turn = SessionTurn("s", create=False, expected_turn=1, note=b"{}", fallback="elsewhere")
    log: Any = Log()
    begun = await note_begun(log, turn, "")
    assert (begun.fallback, begun.expected_turn) == (None, 2)
