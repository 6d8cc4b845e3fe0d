"""Proposes what followed the last few tokens when they last occurred in the session. This is prompt lookup (Saxena
2023), over the session's whole history instead of one prompt."""

from __future__ import annotations

from collections import OrderedDict

from engine.request import LiveRequest
from engine.speculative.adaptive import DraftLength
from engine.speculative.ngram import LONGEST_MATCH, Match, NgramIndex
from engine.speculative.proposers import NOTHING, Proposal
from engine.speculative.step_costs import StepCosts

MOST_INDEXED_TOKENS = 4 * 2**20
"""Limit for the indexes of idle sessions together; the least recently used are dropped first. About 64 MiB."""

TAIL_TOKENS = 16
"""How many tokens are compared to find out whether an index belongs to the history that a turn begins with."""

MATCH_KINDS = 3


class _Session:
    """What is known of one session, or of one request without a session.

    `lengths` are by kind of match; `kind` is that of the last proposal.
    """

    __slots__ = ("index", "kind", "lengths")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.lengths = [DraftLength() for _ in range(MATCH_KINDS)]
        self.kind = 0


class NgramProposer:
    """A Proposer. A long match is better evidence than a short one, so acceptance is estimated by kind: matches of less
    than twice n tokens, longer ones, and those of LONGEST_MATCH (longer stretches being copied)."""

    def __init__(
        self,
        ngram_size: int,
        max_draft_tokens: int,
        costs: StepCosts,
        most_indexed_tokens: int = MOST_INDEXED_TOKENS,
    ) -> None:
        self._ngram_size = ngram_size
        self._max_draft_tokens = max_draft_tokens
        self._costs = costs
        self._most_indexed_tokens = most_indexed_tokens
        self._active: dict[str, _Session] = {}  # by request id
        self._idle: OrderedDict[str, _Session] = OrderedDict()  # by session id, least recently used first
        self._indexed_tokens = 0  # in idle sessions' indexes

    def begin(self, request: LiveRequest) -> None:
        """Costs the tokens that are new to the index, or all of them if the index belongs to another history."""
        if request.request_id not in self._active:
            state = self._take(request.spec.session_id) or _Session(NgramIndex(self._ngram_size))
            index, history_len = state.index, request.spec.history_len
            index.truncate(history_len)
            begin = max(0, len(index) - TAIL_TOKENS)
            if index.tail(TAIL_TOKENS) != list(request.tokens.slice(begin, len(index))):
                state.index = NgramIndex(self._ngram_size)
            self._active[request.request_id] = state
        self._catch_up(request)

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        state = self._catch_up(request)
        match = state.index.propose(min(limit, self._max_draft_tokens))
        if match is None:
            return NOTHING
        state.kind = self._kind(match.length)
        return Proposal(match.token_ids[: self._pays(state, match, request, len(request.tokens))])

    def may_propose(self, request: LiveRequest) -> bool:
        """True while the known tokens are a repetition: it may go on. A rewound sequence's pause is made shorter by
        asking, as by proposing."""
        state = self._catch_up(request)
        match = state.index.propose(self._max_draft_tokens)
        return match is not None and self._pays(state, match, request, request.total_len) > 0

    def observe(self, request: LiveRequest, proposed: int, accepted: int) -> None:
        state = self._active[request.request_id]
        state.lengths[state.kind].observe(proposed, accepted, len(request.tokens))

    def commit(self, request: LiveRequest) -> None:
        self._give_back(request, len(request.tokens))

    def rollback(self, request: LiveRequest) -> None:
        self._give_back(request, request.spec.history_len)

    def forget(self, session_id: str) -> None:
        self._take(session_id)

    def _pays(self, state: _Session, match: Match, request: LiveRequest, position: int) -> int:
        """How many of the match's tokens are worth verifying when the sequence is `position` tokens long."""
        longest = _until_stop(match.token_ids, request.stop_ids)
        cost = self._costs.of_proposals(len(self._active))
        return state.lengths[self._kind(match.length)].choose(position, longest, cost)

    def _kind(self, match_length: int) -> int:
        if match_length < 2 * self._ngram_size:
            return 0
        return 1 if match_length < LONGEST_MATCH else 2

    def _catch_up(self, request: LiveRequest) -> _Session:
        state = self._active[request.request_id]
        known = len(state.index)
        state.index.extend(request.tokens.slice(known, len(request.tokens)))
        return state

    def _take(self, session_id: str | None) -> _Session | None:
        """Removes and returns an idle session's state."""
        state = None if session_id is None else self._idle.pop(session_id, None)
        if state is not None:
            self._indexed_tokens -= len(state.index)
        return state

    def _give_back(self, request: LiveRequest, length: int) -> None:
        """Active -> idle, with its first `length` tokens. Over the limit, the least recently used are dropped."""
        state, session_id = self._active.pop(request.request_id, None), request.spec.session_id
        # Nothing would be kept of no tokens, and the limit would not see it.
        if state is None or session_id is None or length == 0:
            return
        state.index.truncate(length)
        self._take(session_id)
        self._idle[session_id] = state
        self._indexed_tokens += len(state.index)
        while self._indexed_tokens > self._most_indexed_tokens:
            self._take(next(iter(self._idle)))


def _until_stop(token_ids: tuple[int, ...], stop_ids: frozenset[int]) -> int:
    """How many tokens there are up to one that would end the request."""
    for count, token in enumerate(token_ids, 1):
        if token in stop_ids:
            return count
    return len(token_ids)
