"""From a running request to its share of a step."""

from __future__ import annotations

from cache.session_cache import SessionAwareCache
from engine.batch import PENDING, BatchItem, DraftWork, SampleSpec
from engine.request import LiveRequest
from engine.speculative.proposers import NOTHING, NoProposer, Proposal, Proposer
from engine.stops import StopCriteria


class ItemMaker:
    """Makes items; of requests it changes nothing but the pages that proposals need.

    With `mirrors_prompts` a draft model computes its own KV of every prompt along with the target.
    """

    def __init__(
        self, cache: SessionAwareCache, stops: StopCriteria, proposer: Proposer, *, mirrors_prompts: bool
    ) -> None:
        self._cache = cache
        self._max_context_len = stops.max_context_len
        self._proposer = proposer
        self._speculates = not isinstance(proposer, NoProposer)
        self._mirrors_prompts = mirrors_prompts

    def can_go_on(self, request: LiveRequest) -> bool:
        """Whether its next item can be made now. While a result is awaited that takes a request whose next step
        depends on no token's value, and that is not certain to end with that result."""
        if not request.in_flight:
            return True
        if self._speculates or request.penalties is not None or request.next_input_logprob is not None:
            return False
        if request.spec.constraint is not None:
            return False
        room = min(self._output_left(request), self._max_context_len - request.total_len)
        return request.num_pending == 0 or room > 0

    def step_by_step(self, request: LiveRequest) -> bool:
        """Whether every step of it needs the host: for proposals, edits of its logits, its constraint, or
        log-probabilities."""
        spec = request.spec
        if self._speculates or spec.constraint is not None:
            return True
        return spec.sampling.edits_logits or spec.logprobs is not None

    def steps_left(self, request: LiveRequest) -> int:
        """Decode steps until it must end. The last token of all needs no KV."""
        return min(self._output_left(request), self._max_context_len - request.total_len)

    def make(self, request: LiveRequest, count: int, budget: int) -> BatchItem:
        """Its next `count` tokens; proposals may take what they leave of `budget`."""
        kv = request.kv
        assert kv is not None
        start, end = request.launched_len, request.launched_len + count
        last = end == request.total_len
        pending = request.num_pending > 0
        sample = self._sample(request, end) if last else None
        proposal = self._propose(request, budget - count) if count == 1 and sample is not None else NOTHING
        tokens = [PENDING] if pending else request.tokens.slice(start, end)
        item = BatchItem(
            request_id=request.request_id,
            token_ids=[*tokens, *proposal.token_ids],
            start=start,
            pages=kv.pages,
            contiguous=kv.contiguous,
            sample=sample,
            next_token=None if last else request.tokens.at(end),
            window_pages=kv.window.pages if kv.window is not None else None,
            pending_from=request.place if pending else None,
            num_drafts=len(proposal.token_ids),
            run=request.run,
        )
        if self._mirrors_prompts and (proposal.model_count or count > 1 or not last):
            missing = request.tokens.slice(kv.draft_len, end)
            item.draft = DraftWork(kv.draft_len, missing, proposal.model_count)
        if request.next_input_logprob is not None and request.next_input_logprob <= end:
            item.input_logprobs_from = request.next_input_logprob
            item.top_input_logprobs = request.spec.logprobs.top if request.spec.logprobs else 0
        return item

    def cover(self, request: LiveRequest, item: BatchItem, num_steps: int) -> bool:
        """Adds pages for so many steps of a decode, if nothing has to give way for them."""
        kv = request.kv
        assert kv is not None
        if not self._cache.extend_if_free(kv, item.start + num_steps):
            return False
        item.pages, item.contiguous = kv.pages, kv.contiguous
        item.window_pages = kv.window.pages if kv.window is not None else None
        return True

    def draft_len(self, work: DraftWork | None, before: int) -> int | None:
        """How far the draft model's KV goes after a step; None if there is no draft model."""
        if not self._mirrors_prompts:
            return None
        return before if work is None else work.start + len(work.token_ids) + max(work.count - 1, 0)

    def _sample(self, request: LiveRequest, position: int) -> SampleSpec | None:
        sampling, logprobs = request.spec.sampling, request.spec.logprobs
        if sampling.max_new_tokens == 0:
            return None
        wants = logprobs is not None and logprobs.output
        top = logprobs.top if logprobs is not None else 0
        return SampleSpec(sampling, position, request.penalties, wants, top, request.allowed)

    def _propose(self, request: LiveRequest, budget: int) -> Proposal:
        """Drafts for a decode, if there are pages for them: nothing gives way to a guess. Constraints are asked for
        one token at a time, so what has one gets none."""
        kv = request.kv
        assert kv is not None
        if request.spec.constraint is not None:
            return NOTHING
        if request.num_output == 0 or request.next_input_logprob is not None or request.in_flight:
            return NOTHING
        end = len(request.tokens)
        limit = min(self._output_left(request) - 1, self._max_context_len - end - 1, budget)
        if limit <= 0:
            return NOTHING
        proposal = self._proposer.propose(request, limit)
        count = len(proposal.token_ids) + proposal.model_count
        if count and not self._cache.extend_if_free(kv, end + count):
            return NOTHING
        return proposal

    @staticmethod
    def _output_left(request: LiveRequest) -> int:
        return request.spec.sampling.max_new_tokens - request.num_output - request.num_pending
