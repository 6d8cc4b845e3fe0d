"""The facts of the call that is being served. Log records made meanwhile carry them, and so does the access log."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from controllers.session_keys import id_in
from serving.wire.turns import ChatPrompt, TextPrompt, TurnCall, TurnEvent


@dataclass(slots=True)
class CallFacts:
    """The facts of a call: of a request at a front end, or of a turn at a replica. Used on one event loop.

    `request_id` is that of the HTTP request, `response_id` that of the reply. Token counts are sums over all turns of
    the request. Other values are those of the last turn. With `keeps_content`, prompt and answer are kept too.
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
        """The facts of a turn that a front end has sent to this replica."""
        facts = cls(call.http_request_id, replica_id=replica_id, epoch=epoch)
        facts.trace_id = call.traceparent[3:35]
        facts.begin(call)
        return facts

    def begin(self, call: TurnCall) -> None:
        """Notes that a turn begins. Its call names the session by its key."""
        self.turns += 1
        self.response_id, self.tenant = call.request_id, call.tenant
        if call.session is not None:
            self.session_id = id_in(call.session.session_id)
        if self.keeps_content:
            self.said.append(said_in(call))

    def tell(self, event: TurnEvent) -> None:
        """Notes an event of a turn that the client is sent."""
        if event.turn_index is not None:
            self.turn = event.turn_index
        if self.keeps_content:
            self.answer += event.text
        if event.finish is not None:
            self.input_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
            self.output_tokens += event.completion_tokens


CALL_FACTS: ContextVar[CallFacts | None] = ContextVar("kedge_call_facts", default=None)
"""The facts of the call that the current task serves. Tasks that it starts inherit them."""

NAMES = ("request_id", "response_id", "tenant", "session_id", "turn", "replica_id", "epoch", "trace_id")
"""The attributes that log records get."""


def said_in(call: TurnCall) -> Any:
    """A call's prompt, JSON ready."""
    match call.prompt:
        case ChatPrompt():
            return list(call.prompt.messages)
        case TextPrompt():
            return call.prompt.text
        case _:
            return list(call.prompt.token_ids)


class CallFactsFilter(logging.Filter):
    """Adds the facts of the call to each log record, except attributes that the record already has. Lets all pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        facts = CALL_FACTS.get()
        if facts is not None:
            for name in NAMES:
                value = getattr(facts, name)
                if value not in ("", None) and not hasattr(record, name):
                    setattr(record, name, value)
        return True
