"""The proposers of tokens for the model to verify, as the scheduler sees them. Proposals cost time, never correctness.

Called from the engine's thread. State is kept per session, or per request without a session. What a proposer knows of a
session may be out of date (the session was rewound, or moved away and back); it finds that out when the next turn
begins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from engine.request import LiveRequest
from engine.speculative.adaptive import DraftLength
from engine.speculative.step_costs import StepCosts

MOST_SESSIONS = 4096
"""How many idle sessions' acceptance is remembered."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens to verify, or how many tokens the draft model is to propose."""

    token_ids: tuple[int, ...] = ()
    model_count: int = 0


class Proposer(Protocol):
    def begin(self, request: LiveRequest) -> None:
        """The request was admitted, for the first time or after it was retracted."""

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        """At most `limit` tokens to follow `request.tokens`, of which exactly one is not computed yet."""

    def may_propose(self, request: LiveRequest) -> bool:
        """Whether tokens may be proposed after the next one, which is not known yet."""

    def observe(self, request: LiveRequest, proposed: int, accepted: int) -> None:
        """The last proposal was verified; `request.tokens` already holds what was accepted."""

    def commit(self, request: LiveRequest) -> None:
        """The request finished well: its tokens stay."""

    def rollback(self, request: LiveRequest) -> None:
        """The request was aborted or failed: its session goes back to `spec.history_len`."""

    def forget(self, session_id: str) -> None:
        """The session was released, closed or moved away."""


NOTHING = Proposal()


class NoProposer:
    """Speculation is off."""

    def begin(self, request: LiveRequest) -> None: ...

    def propose(self, request: LiveRequest, limit: int) -> Proposal:  # noqa: ARG002
        return NOTHING

    def may_propose(self, request: LiveRequest) -> bool:  # noqa: ARG002
        return False

    def observe(self, request: LiveRequest, proposed: int, accepted: int) -> None: ...

    def commit(self, request: LiveRequest) -> None: ...

    def rollback(self, request: LiveRequest) -> None: ...

    def forget(self, session_id: str) -> None: ...


class DraftModelProposer:
    """Says how many tokens the draft model is to propose. All it knows of a session is how its proposals fared so
    far."""

    def __init__(self, max_draft_tokens: int, costs: StepCosts) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._costs = costs
        self._active: dict[str, DraftLength] = {}  # by request id
        self._idle: OrderedDict[str, DraftLength] = OrderedDict()  # by session id, least recently used first

    def begin(self, request: LiveRequest) -> None:
        if request.request_id not in self._active:
            known = self._idle.pop(request.spec.session_id or "", None)
            self._active[request.request_id] = known or DraftLength()

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        longest = min(limit, self._max_draft_tokens)
        cost = self._costs.of_proposals(len(self._active))
        length = self._active[request.request_id]
        return Proposal(model_count=length.choose(len(request.tokens), longest, cost))

    def may_propose(self, request: LiveRequest) -> bool:  # noqa: ARG002
        return True

    def observe(self, request: LiveRequest, proposed: int, accepted: int) -> None:
        self._active[request.request_id].observe(proposed, accepted, len(request.tokens))

    def commit(self, request: LiveRequest) -> None:
        length, session_id = self._active.pop(request.request_id, None), request.spec.session_id
        if length is not None and session_id is not None:
            self._idle[session_id] = length
            if len(self._idle) > MOST_SESSIONS:
                self._idle.popitem(last=False)

    def rollback(self, request: LiveRequest) -> None:
        self.commit(request)  # a rate needs no undoing

    def forget(self, session_id: str) -> None:
        self._idle.pop(session_id, None)
