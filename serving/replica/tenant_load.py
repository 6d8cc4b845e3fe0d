"""Limits what each tenant has in flight at a replica, so that no tenant takes all of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import EngineOverloaded


@dataclass(slots=True)
class _Use:
    turns: int = 0
    queued_tokens: int = 0


@dataclass(slots=True)
class _Request:
    tenant: str
    queued_tokens: int


class TenantLoad:
    """Counts each tenant's requests in the engine, and their queued tokens. A request's new tokens are queued until its
    first answer token comes.

    The limits apply to each tenant separately (None: no limit). A request is accepted, however long, if its tenant has
    no other tokens queued.
    """

    def __init__(self, max_turns: int | None = None, max_queued_tokens: int | None = None) -> None:
        self._max_turns = max_turns
        self._max_queued_tokens = max_queued_tokens
        self._uses: dict[str, _Use] = {}
        self._requests: dict[str, _Request] = {}

    def begin(self, request_id: str, tenant: str, num_tokens: int) -> None:
        """Counts a request with `num_tokens` new tokens. Raises EngineOverloaded, and then counts nothing."""
        use = self._uses.get(tenant, _Use())
        if self._max_turns is not None and use.turns >= self._max_turns:
            raise EngineOverloaded(f"this tenant has {use.turns} turns in flight here, its limit")
        queued = use.queued_tokens + num_tokens
        if self._max_queued_tokens is not None and use.queued_tokens and queued > self._max_queued_tokens:
            raise EngineOverloaded(
                f"this tenant has {use.queued_tokens} tokens queued here, and this turn has {num_tokens}; its limit "
                f"is {self._max_queued_tokens}"
            )
        use.turns += 1
        use.queued_tokens = queued
        self._uses[tenant] = use
        self._requests[request_id] = _Request(tenant, num_tokens)

    def computed(self, request_id: str) -> None:
        """The request's prompt is no longer queued. May be called again."""
        request = self._requests[request_id]
        self._uses[request.tenant].queued_tokens -= request.queued_tokens
        request.queued_tokens = 0

    def end(self, request_id: str) -> None:
        """The request has ended. May also be called for a request that `begin` refused."""
        if request_id not in self._requests:
            return
        self.computed(request_id)
        tenant = self._requests.pop(request_id).tenant
        use = self._uses[tenant]
        use.turns -= 1
        if not use.turns:
            del self._uses[tenant]
