"""Makes a running request's share of a step."""

from __future__ import annotations

from cache.sequence_kv import SequenceKV
from cache.session_cache import SessionAwareCache
from engine.batch import PENDING, BatchItem, DraftWork
from engine.request import LiveRequest
from engine.speculative.proposers import NOTHING, NoProposer, Proposal, Proposer


class ItemMaker:
    """Makes items. All that it changes in requests is their pages: it adds free ones for proposals, and for launches of
    several steps.

    With `mirrors_prompts` a draft model computes its own KV of every prompt along with the target.
    """

    def __init__(self, cache: SessionAwareCache, proposer: Proposer, *, mirrors_prompts: bool) -> None:
        self._cache = cache
        self._proposer = proposer
        self._speculates = not isinstance(proposer, NoProposer)
        self._mirrors_prompts = mirrors_prompts

    def can_go_on(self, request: LiveRequest) -> bool:
        """Whether the request's next item can be made now. While a result is awaited, that requires that its next step
        depends on no token's value, and that it is not certain to end with that result."""
        if not request.in_flight:
            return True
        if self._mirrors_prompts or request.seen is not None or request.next_input_logprob is not None:
            return False
        if request.is_held or request.awaits_drafts:
            return False
        if request.num_pending == 0:
            return True
        return request.output_left > 0 and not self._may_draft(request)

    def step_by_step(self, request: LiveRequest) -> bool:
        """Whether every step of the request needs the host: for proposals, edits of its logits, its constraint or
        rules, or log-probabilities."""
        spec = request.spec
        if self._speculates or request.is_held:
            return True
        return spec.sampling.edits_logits or spec.logprobs is not None

    def make(self, request: LiveRequest, count: int, budget: int) -> BatchItem:
        """An item for the request's next `count` tokens. Proposals, and KV that the draft model lacks, may use the rest
        of `budget`."""
        kv = request.kv
        assert kv is not None
        start = request.launched_len
        end = start + count
        last = end == request.total_len
        item = BatchItem(
            request.request_id,
            [PENDING] if request.num_pending else request.tokens.slice(start, end),
            start,
            kv.pages,
            kv.contiguous,
            request.sample if last else None,
            request.run,
            request.place if request.num_pending else None,
            kv.window.pages if kv.window is not None else None,
            None if last else request.tokens.at(end),
            adapter=request.spec.adapter,
        )
        if self._speculates or self._mirrors_prompts:
            self._add_drafts(item, request, count, budget)
        if request.next_input_logprob is not None and request.next_input_logprob <= end:
            item.input_logprobs_from = request.next_input_logprob
            item.top_input_logprobs = request.spec.logprobs.top if request.spec.logprobs else 0
        return item

    def cover(self, request: LiveRequest, item: BatchItem, num_steps: int) -> bool:
        """Adds pages for `num_steps` steps of a decode if they are free. Nothing gives way for them."""
        kv = request.kv
        assert kv is not None
        if not self._cache.extend_if_free(kv, item.start + num_steps):
            return False
        self._name_pages(item, kv)
        return True

    @staticmethod
    def draft_len(work: DraftWork | None, before: int) -> int:
        """Length of the draft model's KV after a step."""
        return before if work is None else work.start + len(work.token_ids) + max(work.count - 1, 0)

    def _add_drafts(self, item: BatchItem, request: LiveRequest, count: int, budget: int) -> None:
        kv = request.kv
        assert kv is not None
        last = item.next_token is None
        proposal = NOTHING
        if count == 1 and item.sample is not None:
            proposal = self._propose(request, budget - count)
            item.token_ids = [*item.token_ids, *proposal.token_ids]
            item.num_drafts = len(proposal.token_ids)
            self._name_pages(item, kv)
        if self._mirrors_prompts and (proposal.model_count or count > 1 or not last):
            # A draft model that has not been asked for long catches up over several steps, and proposes only then.
            end = min(item.start + count, kv.draft_len + max(count, budget - proposal.model_count))
            missing = request.tokens.slice(kv.draft_len, end)
            behind = end < item.start + count
            item.draft = DraftWork(kv.draft_len, missing, 0 if behind else proposal.model_count)

    def _may_draft(self, request: LiveRequest) -> bool:
        """Whether the request's next decode may get proposals, by what is known so far. If not, and the pending token
        changes that, the proposals come a step later."""
        return request.output_left > 1 and self._proposer.may_propose(request)

    def _propose(self, request: LiveRequest, budget: int) -> Proposal:
        """Proposals for a decode, if there are free pages for them: nothing gives way to a guess. Constraints and rules
        decide one token at a time, so a request that is held to them gets none."""
        kv = request.kv
        assert kv is not None
        if request.is_held:
            return NOTHING
        if request.num_output == 0 or request.next_input_logprob is not None or request.in_flight:
            return NOTHING
        end = request.total_len
        limit = min(request.output_left - 1, budget)
        if limit <= 0:
            return NOTHING
        proposal = self._proposer.propose(request, limit)
        count = len(proposal.token_ids) + proposal.model_count
        if count and not self._cache.extend_if_free(kv, end + count):
            return NOTHING
        return proposal

    @staticmethod
    def _name_pages(item: BatchItem, kv: SequenceKV) -> None:
        """Updates the item's tables, since pages may have been added."""
        item.pages, item.contiguous = kv.pages, kv.contiguous
        item.window_pages = kv.window.pages if kv.window is not None else None
