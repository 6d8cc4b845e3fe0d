"""A session's tools are those of the turn that begins its history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manual_clock import ManualClock
from session_book import make_chain

from controllers.errors import ToolsDiffer
from controllers.records import SessionRecord
from controllers.session import SessionController
from controllers.tokens import encode_tokens
from controllers.turns import Replay, Turn

RECORD = SessionRecord("s", "t", 1, "r")


@pytest.fixture
def sessions(clock: ManualClock) -> SessionController:
    sessions = SessionController(clock, 60.0, make_chain=make_chain)
    sessions.adopt(RECORD)
    return sessions


def run(
    sessions: SessionController, tools: str | None, session_id: str = "s", **options: object
) -> str | None:
    """Runs one turn. Returns the tools that its record logs."""
    turn = sessions.begin_turn(session_id, 1, tools=tools, **options)
    assert isinstance(turn, Turn)
    record = sessions.prepare_commit(turn, [1, 2], [3], b"")
    sessions.commit_turn(turn, record)
    return record.tools


def test_later_turns_name_the_same_or_none(sessions: SessionController) -> None:
    assert [run(sessions, tools) for tools in ("a", "a", None, "a")] == ["a", "a", None, "a"]
    with pytest.raises(ToolsDiffer, match="began with others") as caught:
        sessions.begin_turn("s", 1, tools="b")
    assert caught.value.param == "tools"
    run(sessions, "a")


def test_a_session_that_began_without_tools_has_none(sessions: SessionController) -> None:
    run(sessions, None)
    with pytest.raises(ToolsDiffer, match="began with no tools"):
        sessions.begin_turn("s", 1, tools="a")
    run(sessions, "a", rewind_to=0)
    run(sessions, "a")


def test_an_aborted_first_turn_leaves_no_tools(sessions: SessionController) -> None:
    turn = sessions.begin_turn("s", 1, tools="a")
    assert isinstance(turn, Turn)
    sessions.abort_turn(turn)
    run(sessions, "b")
    run(sessions, "b")


def test_they_come_with_the_log(clock: ManualClock) -> None:
    sessions = SessionController(clock, 60.0, make_chain=make_chain)
    sessions.adopt(replace(RECORD, history=encode_tokens([1, 2]), turns=1, tools="a"))
    run(sessions, "a")
    with pytest.raises(ToolsDiffer):
        sessions.begin_turn("s", 1, tools="b")


def test_forks_inherit_them(sessions: SessionController) -> None:
    run(sessions, "a")
    fork = sessions.begin_fork("s", 1, 2)
    sessions.finish_fork(fork, replace(RECORD, session_id="child"))
    run(sessions, "a", "child")
    with pytest.raises(ToolsDiffer):
        sessions.begin_turn("child", 1, tools="b")


def test_a_replay_comes_before_them(sessions: SessionController) -> None:
    run(sessions, "a", idempotency_key="k")
    assert isinstance(sessions.begin_turn("s", 1, idempotency_key="k", tools="b"), Replay)
