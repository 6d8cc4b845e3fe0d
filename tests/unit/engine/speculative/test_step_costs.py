"""What proposals cost follows from steps that were measured, or from what the settings say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.batch import ScheduledBatch
from engine.build import build_engine
from engine.runner.protocol import Done
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from engine.speculative.adaptive import ProposalCost
from engine.speculative.step_costs import FREE, StepCosts, step_costs
from tests.unit.engine.null_runner import NullRunner

ANY = SpeculationSettings("ngram")
MODELS = Path(__file__).parents[4] / "assets" / "models"


class TimedRunner(NullRunner):
    """Its clock shows what steps would take: 100 ms for one token, 30 for the second, 20 for each after it, and 50 for
    a pass of the draft model. Every fifth step is disturbed, and takes longer."""

    def __init__(self, num_pages: int = 8, **options: Any) -> None:
        super().__init__(num_pages, 4, 64, 128, poison=True, **options)
        self.now_s = 0.0
        self.steps = 0
        self.most_tokens = 0

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: ScheduledBatch) -> Done:
        (item,) = batch.items
        more = item.num_tokens - 1
        self.now_s += 0.1 + (0.03 + 0.02 * (more - 1) if more else 0.0)
        self.now_s += 0.05 * (item.draft.count if item.draft else 0)
        self.now_s += 1.0 if self.steps % 5 == 0 else 0.0
        self.steps += 1
        self.most_tokens = max(self.most_tokens, item.num_tokens)
        return super().launch(batch)


def measured(speculation: SpeculationSettings, runner: TimedRunner, max_batch_tokens: int = 64) -> StepCosts:
    return step_costs(speculation, runner, max_batch_tokens, runner.clock)


def about(costs: StepCosts) -> tuple[float, float, float]:
    return (round(costs.second, 6), round(costs.row, 6), round(costs.draft, 6))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of this module's runner are longer than real ones."""
    monkeypatch.setattr("engine.speculative.step_costs.LONGEST_S", 1000.0)


def test_what_one_more_token_costs_depends_on_how_many_there_are() -> None:
    costs = StepCosts(second=0.3, row=0.1)
    assert costs.of_proposals(1) == ProposalCost(0.1, pytest.approx(0.2))
    crowd = costs.of_proposals(10_000)
    assert crowd.row == pytest.approx(1.0, abs=0.01)
    assert crowd.first == pytest.approx(0.0, abs=1e-9)
    drafting = replace(costs, draft=0.4).of_proposals(1)
    assert (drafting.row, drafting.first) == pytest.approx((0.5, 0.4))


@pytest.mark.parametrize("streams", [1, 2, 7])
@pytest.mark.parametrize("proposals", [1, 3, 7])
def test_a_step_takes_what_its_tokens_take(streams: int, proposals: int) -> None:
    costs = StepCosts(second=0.3, row=0.1)

    def step(tokens: int) -> float:
        return 1.0 + (0.3 + 0.1 * (tokens - 2) if tokens > 1 else 0.0)

    cost = costs.of_proposals(streams)
    expected = step(streams * (1 + proposals)) / step(streams)
    assert 1.0 + cost.first + cost.row * proposals == pytest.approx(expected)


def test_settings_that_name_the_costs_are_taken() -> None:
    runner = TimedRunner()
    assert measured(replace(ANY, row_cost=0.2, draft_cost=0.4), runner) == StepCosts(0.2, 0.2)
    drafts = SpeculationSettings("draft", row_cost=0.2, draft_cost=0.4)
    assert measured(drafts, runner) == StepCosts(0.2, 0.2, 0.4)
    assert runner.steps == 0


@pytest.mark.usefixtures("quick")
def test_what_settings_leave_open_is_measured() -> None:
    assert about(measured(ANY, TimedRunner())) == (0.3, 0.2, 0.0)
    drafts = SpeculationSettings("draft")
    assert about(measured(drafts, TimedRunner())) == (0.3, 0.2, 0.5)
    assert about(measured(replace(drafts, row_cost=0.7), TimedRunner())) == (0.7, 0.7, 0.5)
    assert about(measured(replace(drafts, draft_cost=0.1), TimedRunner())) == (0.3, 0.2, 0.1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("most", "num_pages", "max_batch_tokens", "tokens"),
    [(1, 8, 64, 2), (7, 1, 64, 4), (7, 8, 6, 6), (7, 8, 64, 8)],
)
def test_no_measured_step_is_larger_than_steps_may_be(
    most: int, num_pages: int, max_batch_tokens: int, tokens: int
) -> None:
    runner = TimedRunner(num_pages)
    found = measured(replace(ANY, max_draft_tokens=most), runner, max_batch_tokens)
    assert runner.most_tokens == tokens
    assert found.second == pytest.approx(0.3)
    assert found.row == pytest.approx(0.3 if most == 1 else 0.2)


def test_where_no_step_has_room_for_a_proposal_nothing_is_measured() -> None:
    runner = TimedRunner()
    assert measured(ANY, runner, max_batch_tokens=1) == FREE
    assert runner.steps == 0


def test_slow_steps_are_few() -> None:
    runner = TimedRunner()
    measured(ANY, runner)
    assert runner.steps == 3 + 3  # one round to warm up, and one that took over LONGEST_S


@pytest.mark.usefixtures("quick")
def test_layers_with_windows_are_measured() -> None:
    runner = TimedRunner(window_len=8, num_window_pages=8)
    assert about(measured(ANY, runner)) == (0.3, 0.2, 0.0)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_an_engine_measures_its_model_and_says_what_it_found(method: SpeculationMethod) -> None:
    model = ModelSettings(str(MODELS / "kedge-chat"), num_threads=1)
    draft = ModelSettings(str(MODELS / "kedge-chat-draft"), num_threads=1) if method == "draft" else None
    speculation = SpeculationSettings(method, draft_model=draft)
    engine = build_engine(EngineSettings(model, CacheSettings(num_pages=8), speculation=speculation), print)
    described = engine.describe()
    costs = [described[f"speculation_{name}_cost"] for name in ("second_row", "row", "draft")]
    assert all(isinstance(cost, float) and cost >= 0.0 for cost in costs)
    assert any(costs)
