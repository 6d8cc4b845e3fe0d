"""Constrained turns on a replica: in sessions, with a key, resumed elsewhere, and refused without a trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from serving.text.text import TextProcessor
from serving.wire.turns import OutputConstraint, ResumedTurn, TurnEvent
from tests.unit.serving.local_service import small_text
from tests.unit.serving.replica_rig import call, running_rig, tokens_of

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
HELD = OutputConstraint("json_schema", json.dumps(SCHEMA))
OTHER = OutputConstraint("regex", "[a-z]{4}")
BAD = OutputConstraint("json_schema", '{"not": {}}')
TEXT: TextProcessor = small_text()


def text_of(events: list[TurnEvent]) -> str:
    assert events[-1].error is None, events[-1].error
    return "".join(event.text for event in events)


def held(tokens: list[int], *session: str, **options: Any) -> Any:
    return call(tokens, *session, max_new_tokens=80, constraint=HELD, **options)


async def test_a_constrained_turn_is_a_turn_like_any_other(tmp_path: Path) -> None:
    async with running_rig(tmp_path, text=TEXT) as rig:
        epoch = rig.open_session("s")
        await rig.run(call([5, 6, 7], "s"), epoch)
        events = await rig.run(held([8, 9], "s"), epoch)
        assert set(json.loads(text_of(events))) == {"n", "ok"}
        assert events[-1].finish is not None
        assert (events[-1].finish.reason, events[-1].finish.matched) == ("stop", None)
        known = events[-1].prompt_tokens + events[-1].completion_tokens
        last = (await rig.run(call([3], "s"), epoch))[-1]
        assert (last.cached_tokens, last.prompt_tokens) == (known - 1, known + 1)
        await rig.host.close("s", 1)
        await rig.books_are_empty()


async def test_what_cannot_be_enforced_changes_nothing_of_the_session(tmp_path: Path) -> None:
    async with running_rig(tmp_path, text=TEXT) as rig:
        epoch = rig.open_session("s")
        first = (await rig.run(call([5, 6, 7], "s"), epoch))[-1]
        kv = rig.engine.session_kv_tokens().result(20)
        for options in ({"key": "k"}, {}):
            (refused,) = await rig.run(call([8], "s", constraint=BAD, **options), epoch)
            assert refused.error is not None
            assert (refused.error.status, refused.error.param) == (400, "json_schema")
        assert rig.engine.session_kv_tokens().result(20) == kv
        last = (await rig.run(held([8], "s", key="k"), epoch))[-1]
        assert last.prompt_tokens == first.prompt_tokens + first.completion_tokens + 1


async def test_a_key_stands_for_one_constraint(tmp_path: Path) -> None:
    async with running_rig(tmp_path, text=TEXT) as rig:
        epoch = rig.open_session("s")
        events = await rig.run(held([8], "s", key="k"), epoch)
        again = await rig.run(held([8], "s", key="k"), epoch)
        assert text_of(again) == text_of(events)
        for other in (OTHER, None):
            (refused,) = await rig.run(call([8], "s", key="k", max_new_tokens=80, constraint=other), epoch)
            assert refused.error is not None
            assert refused.error.code == "idempotency_conflict"


async def test_begun_elsewhere_it_goes_on_in_the_middle(tmp_path: Path) -> None:
    """The second replica has never seen the turn's grammar."""
    async with running_rig(tmp_path / "a", text=TEXT) as rig:
        whole = await rig.run(held([8, 9]))
    tokens = tokens_of(whole)
    for known in (1, len(tokens) // 2, len(tokens) - 1):
        async with running_rig(tmp_path / f"b{known}", text=TEXT) as rig:
            again = await rig.run(held([8, 9], resumed=ResumedTurn(tuple(tokens[:known]))))
            assert tokens_of(again) == tokens
            assert text_of(again) == text_of(whole)


async def test_side_by_side_each_keeps_to_its_own(tmp_path: Path) -> None:
    async with running_rig(tmp_path, text=TEXT) as rig:
        alone = [
            text_of(await rig.run(call([index + 5], constraint=one)))
            for index, one in enumerate([None, OTHER])
        ]
        calls = [
            call([5], request_id="free"),
            call([6], request_id="other", constraint=OTHER),
            held([7], request_id="held"),
        ]
        free, other, json_ = await asyncio.gather(*map(rig.run, calls))
        assert [text_of(free), text_of(other)] == alone
        assert len(alone[1]) == 4
        json.loads(text_of(json_))
