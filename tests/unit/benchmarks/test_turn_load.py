"""The load of sessions: whose history is whose, and what its figures count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.gpu.turns import Event, OutOfTime, Plan, Turn, figures, last_whole_turn, run_load

PLAN = Plan(sessions=3, turns=4, shared=10, new=2, out=3, vocab_size=50)


class Parrot:
    """A Side that answers sessions in turn, one token at a time. Token n of a request is its prompt's length + n."""

    name = "parrot"

    def __init__(self, silent: bool = False) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.silent = silent

    def submit(self, name: str, history: Sequence[int], new: Sequence[int], count: int) -> None:
        self.prompts[name] = [*history, *new]
        self.left[name] = count

    def events(self, limit_s: float) -> list[Event]:
        assert limit_s > 0
        if self.silent:
            return []
        name = next(iter(self.left))
        left = self.left.pop(name) - 1
        if left:
            self.left[name] = left
        token = len(self.prompts[name]) + left
        return [Event(name, 0.0, (token,), left == 0)]


def test_a_turn_gets_all_that_was_said_before() -> None:
    side = Parrot()
    done = run_load(side, PLAN, 30.0)
    assert sorted((turn.session, turn.number) for turn in done) == [
        (session, number) for session in (1, 2, 3) for number in (1, 2, 3, 4)
    ]
    for session in (1, 2, 3):
        said = list(PLAN.shared_tokens())
        for number in (1, 2, 3, 4):
            said += PLAN.new_tokens(session, number)
            assert side.prompts[f"7-{session}/{number}"] == said
            said += next(each for each in done if (each.session, each.number) == (session, number)).output


def test_sessions_and_turns_differ_and_repeat() -> None:
    drawn = {tuple(PLAN.new_tokens(session, turn)) for session in (1, 2, 3) for turn in (1, 2, 3)}
    assert len(drawn) > 5
    assert PLAN.new_tokens(2, 3) == PLAN.new_tokens(2, 3)
    assert all(3 <= token < 50 for token in PLAN.shared_tokens())


def test_a_side_that_never_answers_does_not_hold_the_run() -> None:
    with pytest.raises(OutOfTime):
        run_load(Parrot(silent=True), PLAN, 0.0)


def test_what_a_load_before_left_behind_is_passed_over() -> None:
    side = Parrot()
    for number in (1, 2):
        side.submit(f"6-1/{number}", [], [4, 5], 3)
    assert len(run_load(side, PLAN, 30.0)) == 12


def test_figures_are_of_whole_turns_from_the_second() -> None:
    done = []
    for session in (1, 2, 3):
        for number in (1, 2, 3, 4):
            if (session, number) != (2, 4):  # turn 4 of session 2 is cut off
                begin_s = 10.0 * number + session
                done.append(Turn(session, number, begin_s, begin_s + 0.1 * session, begin_s + 5.0, [1, 2, 3]))
    assert last_whole_turn(done, PLAN) == 3
    result = figures(done, 3)
    assert result.turns == 6
    assert result.tokens_per_s == pytest.approx(6 * 3 / (38.0 - 21.0))
    assert result.ttft_median_s == pytest.approx(0.2)
    assert result.turn_median_s == pytest.approx(5.0)
    with pytest.raises(ValueError, match="second turn"):
        figures(done, 1)
