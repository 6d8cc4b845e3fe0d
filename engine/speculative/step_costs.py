"""What steps cost: by their number of tokens, and with passes of the draft model. It decides how many proposals pay, so
it is measured on the machine and the model that will run them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache.sequence_kv import pages_for
from engine.api import SamplingParams
from engine.batch import BatchItem, DraftWork, SampleSpec, ScheduledBatch
from engine.runner.protocol import Runner
from engine.settings import SpeculationSettings
from engine.speculative.adaptive import ProposalCost

ROUNDS = 30
LONGEST_S = 0.5
"""Rounds of measured steps at start. No round begins after LONGEST_S."""

TOKEN = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """As shares of a step of one token. A step of n >= 2 tokens takes 1 + second + row * (n - 2). A pass of the draft
    model, which proposes one token for each request, takes `draft`."""

    second: float
    row: float
    draft: float = 0.0

    def of_proposals(self, streams: int) -> ProposalCost:
        """For `streams` requests in a step. The draft model's first pass costs half as much again, since it catches up
        with what the model generated."""
        without = self._step(streams)
        row = self.row * streams / without
        first = self._step(2 * streams) / without - 1.0 - row
        return ProposalCost(row + self.draft, first + self.draft / 2)

    def describe(self) -> dict[str, float]:
        """For the report at start, see Engine.describe."""
        costs = {"second_row_cost": self.second, "row_cost": self.row, "draft_cost": self.draft}
        return {f"speculation_{name}": round(cost, 3) for name, cost in costs.items()}

    def _step(self, tokens: int) -> float:
        return 1.0 if tokens == 1 else 1.0 + self.second + self.row * (tokens - 2)


FREE = StepCosts(0.0, 0.0)


def step_costs(
    speculation: SpeculationSettings,
    runner: Runner,
    max_batch_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """The settings' costs, or measured ones where they name none. Measured steps write to the first pages of the pools,
    so nothing may be in them yet. Raises what the runner raises."""
    row, drafts = speculation.row_cost, speculation.method == "draft"
    draft = speculation.draft_cost if drafts else 0.0
    if row is not None and draft is not None:
        return StepCosts(row, row, draft)
    facts = runner.facts
    most_tokens = min(max_batch_tokens, facts.max_context_len, facts.num_pages * facts.page_size)
    most = min(speculation.max_draft_tokens, most_tokens - 1)
    if most < 1:
        return FREE
    found = _measured(runner, most, drafts, clock)
    return StepCosts(
        found.second if row is None else row,
        found.row if row is None else row,
        found.draft if draft is None else draft,
    )


def _measured(runner: Runner, most: int, drafts: bool, clock: Callable[[], float]) -> StepCosts:
    """Each cost from the shortest of its steps: whatever else the machine does makes them longer."""
    batches = {(count, 0): _batch(runner, count) for count in (0, 1, most)}
    if drafts:
        batches[0, most] = _batch(runner, 0, most)
    shortest_s = dict.fromkeys(batches, float("inf"))
    for batch in batches.values():
        runner.launch(batch).result()
    begin_s = clock()
    for _ in range(ROUNDS):
        for key, batch in batches.items():
            from_s = clock()
            runner.launch(batch).result()
            shortest_s[key] = min(shortest_s[key], clock() - from_s)
        if clock() - begin_s > LONGEST_S:
            break
    one_s, two_s, all_s = (shortest_s[count, 0] for count in (0, 1, most))
    second = max(0.0, two_s - one_s) / one_s
    row = second if most == 1 else max(0.0, all_s - two_s) / (most - 1) / one_s
    passes_s = shortest_s[0, most] - all_s if drafts else 0.0
    return StepCosts(second, row, max(0.0, passes_s) / most / one_s)


def _batch(runner: Runner, given: int, drafted: int = 0) -> ScheduledBatch:
    """One request's first token with proposals: `given` ones, or those that the draft model makes."""
    facts = runner.facts
    pages = np.arange(pages_for(1 + given + drafted, facts.page_size), dtype=np.int32)
    item = BatchItem(
        "step costs",
        [TOKEN] * (1 + given),
        0,
        pages,
        True,
        SampleSpec(SamplingParams(temperature=0.0)),
        window_pages=None if facts.window_len is None else pages,
        num_drafts=given,
        draft=DraftWork(0, [TOKEN], drafted) if drafted else None,
    )
    return ScheduledBatch([item])
