"""What is known of the call that is being served: log records made meanwhile have it, as has the access log."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from controllers.session_keys import id_in
from serving.wire.turns import ChatPrompt, TextPrompt, TurnCall, TurnEvent


@dataclass(slots=True)
class CallFacts:
    """Owned by whoever serves the call, on one event loop: a request at a front end, a turn at a replica.

    `request_id` is that of the HTTP request, `response_id` the one that a reply has. Tokens are sums over all turns of
    the request; of the rest the last turn's counts. With `keeps_content` it has what was said, too.
    """

    request_id: str = ""
    response_id: str = ""
    tenant: str = ""
    session_id: str = ""
    turn: int | None = None
    replica_id: str = ""
    epoch: int | None = None
    trace_id: str = ""
    turns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    keeps_content: bool = False
    said: list[Any] = field(default_factory=list)
    answer: str = ""

    @classmethod
    def at_replica(cls, call: TurnCall, replica_id: str, epoch: int | None) -> CallFacts:
        """Of a turn that a front end has sent there."""
        facts = cls(call.http_request_id, replica_id=replica_id, epoch=epoch)
        facts.trace_id = call.traceparent[3:35]
        facts.begin(call)
        return facts

    def begin(self, call: TurnCall) -> None:
        """A turn begins; its session is named by the key."""
        self.turns += 1
        self.response_id, self.tenant = call.request_id, call.tenant
        if call.session is not None:
            self.session_id = id_in(call.session.session_id)
        if self.keeps_content:
            self.said.append(said_in(call))

    def tell(self, event: TurnEvent) -> None:
        """The client is told this of a turn."""
        if event.turn_index is not None:
            self.turn = event.turn_index
        if self.keeps_content:
            self.answer += event.text
        if event.finish is not None:
            self.input_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
            self.output_tokens += event.completion_tokens


CALL_FACTS: ContextVar[CallFacts | None] = ContextVar("kedge_call_facts", default=None)
"""Of the task that serves it, and of those that it starts."""

NAMES = ("request_id", "response_id", "tenant", "session_id", "turn", "replica_id", "epoch", "trace_id")
"""As records have them."""


def said_in(call: TurnCall) -> Any:
    """A call's prompt, as JSON can have it."""
    match call.prompt:
        case ChatPrompt():
            return list(call.prompt.messages)
        case TextPrompt():
            return call.prompt.text
        case _:
            return list(call.prompt.token_ids)


class CallFactsFilter(logging.Filter):
    """Gives each record what is known of the call that it is about, unless it says that itself. Lets all pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        facts = CALL_FACTS.get()
        if facts is not None:
            for name in NAMES:
                value = getattr(facts, name)
                if value not in ("", None) and not hasattr(record, name):
                    setattr(record, name, value)
        return True
