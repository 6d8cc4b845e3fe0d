"""A draft model that was not asked for long lacks KV. It computes that in steps no longer than any other."""

from __future__ import annotations

import pytest

from engine.request import LiveRequest
from engine.speculative.proposers import DraftModelProposer, Proposal
from engine.speculative.step_costs import FREE
from tests.unit.engine.driver import DRAFTS, VOCAB, Driver, request
from tests.unit.engine.null_runner import null_generate

PROMPT = [3, 1, 4, 1]
ANSWER_LEN = 60
ASKED_FROM = 40


class LateProposer(DraftModelProposer):
    """Asks the draft model for nothing before a history has ASKED_FROM tokens."""

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        count = min(limit, DRAFTS) if len(request.tokens) >= ASKED_FROM else 0
        return Proposal(model_count=count)


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_it_catches_up_within_the_budget_of_a_step(budget: int) -> None:
    driver = Driver(
        speculation="draft", guesser=LateProposer(DRAFTS, FREE), max_batch_tokens=budget, chunk_size=4
    )
    driver.add(request("a", PROMPT, ANSWER_LEN))
    driver.run()

    drafts = [item.draft for batch in driver.batches for item in batch.items if item.draft is not None]
    assert max(len(draft.token_ids) for draft in drafts) <= budget
    assert max(item.budget_tokens for batch in driver.batches for item in batch.items) <= budget
    assert driver.counters.draft_tokens > 0, "it proposes once it has caught up"
    assert driver.outcomes["a"].token_ids == null_generate(PROMPT, ANSWER_LEN, VOCAB)
