"""A response of /v1/responses as JSON: while it is being made, and when it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from serving.front.api.answers.logprobs import logprob_json
from serving.front.api.answers.reader import AnswerReader
from serving.front.api.responses.items import Json
from serving.front.api.responses.output import Event, OutputItems, Status
from serving.front.api.responses.tools import OfferedTools
from serving.text.reasoning.formats import ReasoningName
from serving.text.tool_calls.formats import FormatName
from serving.wire.turns import ErrorInfo, TurnEvent, TurnFinish

_SERVER_ERROR = "server_error"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is known of a response from its beginning on. `repeated`: the fields of its request that it repeats.
    `tool_calls` and `reasoning`: the formats in which its model writes these (ModelInfo)."""

    id: str
    model_id: str
    repeated: Json
    tool_calls: FormatName | None
    reasoning: ReasoningName | None
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_background(self) -> bool:
        return bool(self.repeated["background"])

    def response(self, status: str, **more: Any) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model_id,
            "output": [],
            "usage": None,
            **self.repeated,
            **more,
        }

    def failed(self, info: ErrorInfo, output: list[Json]) -> Json:
        code = info.code if info.status < 500 else _SERVER_ERROR
        return self.response("failed", output=output, error={"code": code, "message": info.message})


class ResponseReader:
    """Makes a response, and its events, of the events of its one turn."""

    def __init__(
        self,
        head: ResponseHead,
        reader: AnswerReader,
        tools: OfferedTools,
        *,
        encrypts_reasoning: bool,
        top_logprobs: int = 0,
    ) -> None:
        self._head = head
        self._reader = reader
        self._top_logprobs = top_logprobs
        self._items = OutputItems(head.id, tools, encrypts_reasoning=encrypts_reasoning)

    @property
    def items(self) -> list[Json]:
        """The items of the output that have ended."""
        return self._items.items

    def read(self, output: TurnEvent) -> list[Event]:
        """The response's events for the turn's next event, or for the whole turn."""
        logprobs = [logprob_json(entry, self._top_logprobs) for entry in output.logprobs]
        events = list(self._items.add(self._reader.read(output), logprobs))
        finish = self._reader.finish(output)
        if finish is None:
            return events
        if finish.reason == "abort":
            return [*events, *self._items.end(_status_of(finish))]
        return [*events, *self._items.end_answer(_status_of(finish))]

    def response(self, output: TurnEvent) -> Json | None:
        """The whole response, once its turn has ended and been read."""
        finish = self._reader.finish(output)
        if finish is None:
            return None
        said = {"output": self.items, "usage": usage_of(output)}
        if finish.reason == "abort":
            return self._head.response("cancelled", **said)
        status = _status_of(finish)
        why = None if status == "completed" else {"reason": "max_output_tokens"}
        return self._head.response(
            status, incomplete_details=why, completed_at=completed_at_of(output), **said
        )


def completed_at_of(output: TurnEvent) -> int | None:
    return None if output.ended_s is None else int(output.ended_s)


def usage_of(output: TurnEvent) -> Json:
    return {
        "input_tokens": output.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": output.prompt_tokens + output.completion_tokens,
    }


def _status_of(finish: TurnFinish) -> Status:
    return "incomplete" if finish.reason in ("length", "abort") else "completed"
