"""The items of an answer of /v1/responses: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from serving.front.api.answers.custom_input import CustomInput
from serving.front.api.answers.reader import AnswerPart
from serving.front.api.responses.items import Json, response_scope
from serving.front.api.responses.reasoning import encoded_thought
from serving.front.api.responses.tools import OfferedTool, OfferedTools
from serving.text.answer_pieces import CallPiece, Thought
from serving.text.tool_calls.json_extent import JsonExtent

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class _OpenItem(Protocol):
    """An item that has not ended yet."""

    item: Json

    def begin(self) -> Iterator[Event]: ...

    def push(self, piece: str) -> Iterator[Event]: ...

    def end(self, status: Status) -> Iterator[Event]: ...


class OutputItems:
    """Makes the items of one answer, and their events. One item is open at a time; a piece of another kind, or of
    another call, ends it.

    `items` are those that have ended. Their ids are derived from the response's id, so they are the same whenever it is
    read again. Log-probabilities come only with answers that are one message.
    """

    def __init__(self, response_id: str, tools: OfferedTools, *, encrypts_reasoning: bool) -> None:
        self.items: list[Json] = []
        self._scope = response_scope(response_id)
        self._tools = tools
        self._encrypts_reasoning = encrypts_reasoning
        self._open: _OpenItem | None = None
        self._told: tuple[str, int | None] | None = None
        self._logprobs: list[msgspec.Raw] = []
        """Log-probabilities of tokens whose text is yet to come."""

    def add(self, part: AnswerPart, logprobs: Iterable[msgspec.Raw] = ()) -> Iterator[Event]:
        """The events for the next part of the answer. `logprobs`: JSON of the log-probabilities of its tokens."""
        self._logprobs += logprobs
        for piece in part.pieces:
            if isinstance(piece, CallPiece):
                yield from self._in("call", piece.index, piece)
                if piece.arguments:
                    yield from self._push(piece.arguments)
            elif isinstance(piece, Thought):
                yield from self._in("reasoning", None, None)
                yield from self._push(piece.text)
            elif piece:
                yield from self._in("message", None, None)
                yield from self._push(piece)

    def end_answer(self, status: Status) -> Iterator[Event]:
        """Ends the answer. An answer that said nothing becomes an empty message, which has an id to go on from."""
        if not self.items:
            yield from self._in("message", None, None) if self._open is None else ()
        yield from self.end(status)

    def end(self, status: Status) -> Iterator[Event]:
        """Ends the item that is open, if one is."""
        if self._open is None:
            return
        item, self._open, self._told = self._open, None, None
        yield from item.end(status)
        index = len(self.items)
        self.items.append(item.item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item.item}

    def _in(self, kind: str, call: int | None, begun: CallPiece | None) -> Iterator[Event]:
        if self._told == (kind, call):
            return
        yield from self.end("completed")
        index = len(self.items)
        self._open, self._told = self._new_item(kind, index, begun), (kind, call)
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(self._open.item)}
        yield from self._open.begin()

    def _push(self, piece: str) -> Iterator[Event]:
        assert self._open is not None
        yield from self._open.push(piece)

    def _new_item(self, kind: str, index: int, call: CallPiece | None) -> _OpenItem:
        item_id = f"{self._scope}o{index}"
        if call is None:
            if kind == "message":
                return _TextItem(_message(f"msg_{item_id}"), index, _MESSAGE, self._logprobs)
            thought = _thought(f"rs_{item_id}")
            return _TextItem(thought, index, _REASONING, None, encrypts=self._encrypts_reasoning)
        offered = self._tools.called(call.name or "")
        if offered is not None and offered.kind == "custom":
            return _CustomCall(f"ctc_{item_id}", index, call, offered)
        return _FunctionCall(f"fc_{item_id}", index, call, offered)


@dataclass(frozen=True, slots=True)
class _TextKind:
    """A kind of text item. `deltas`: how the names of its text's events begin."""

    deltas: str
    part: Callable[[str], Json]


_MESSAGE = _TextKind(
    "response.output_text",
    lambda text: {"type": "output_text", "text": text, "annotations": [], "logprobs": []},
)
_REASONING = _TextKind("response.reasoning_text", lambda text: {"type": "reasoning_text", "text": text})


class _TextItem:
    """An item with one part of text. It takes the log-probabilities of its text out of `logprobs`; None: items of its
    kind have none."""

    def __init__(
        self,
        item: Json,
        index: int,
        kind: _TextKind,
        logprobs: list[msgspec.Raw] | None,
        *,
        encrypts: bool = False,
    ) -> None:
        self.item = item
        self._kind = kind
        self._encrypts = encrypts
        self._place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._untold = logprobs
        self._logprobs: list[msgspec.Raw] = []

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.content_part.added", **self._place, "part": self._kind.part("")}

    def push(self, piece: str) -> Iterator[Event]:
        self._texts.append(piece)
        of_delta = self._new_logprobs()
        yield {"type": f"{self._kind.deltas}.delta", **self._place, "delta": piece, **of_delta}

    def end(self, status: Status) -> Iterator[Event]:
        text = "".join(self._texts)
        self._new_logprobs()
        of_text = {} if self._untold is None else {"logprobs": self._logprobs}
        part = self._kind.part(text) | of_text
        self.item |= {"content": [part], "status": status}
        if self._encrypts:
            self.item["encrypted_content"] = encoded_thought(text)
        yield {"type": f"{self._kind.deltas}.done", **self._place, "text": text, **of_text}
        yield {"type": "response.content_part.done", **self._place, "part": part}

    def _new_logprobs(self) -> Json:
        if self._untold is None:
            return {}
        new = self._untold[:]
        self._untold.clear()
        self._logprobs += new
        return {"logprobs": new}


class _Arguments:
    """The arguments of a call, a JSON object. A call without its end is incomplete, whatever follows it."""

    def __init__(self) -> None:
        self._extent = JsonExtent()
        self._have_ended = False

    def push(self, piece: str) -> None:
        self._have_ended = self._have_ended or self._extent.end(piece) is not None

    def status(self, status: Status) -> Status:
        return status if self._have_ended else "incomplete"


class _FunctionCall:
    def __init__(self, item_id: str, index: int, call: CallPiece, offered: OfferedTool | None) -> None:
        self.item: Json = _call("function_call", item_id, call, offered) | {"arguments": ""}
        self._place = {"item_id": item_id, "output_index": index}
        self._arguments = _Arguments()

    def begin(self) -> Iterator[Event]:
        return iter(())

    def push(self, piece: str) -> Iterator[Event]:
        self._arguments.push(piece)
        self.item["arguments"] += piece
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": piece}

    def end(self, status: Status) -> Iterator[Event]:
        self.item["status"] = self._arguments.status(status)
        yield {
            "type": "response.function_call_arguments.done",
            **self._place,
            "name": self.item["name"],
            "arguments": self.item["arguments"],
        }


class _CustomCall:
    def __init__(self, item_id: str, index: int, call: CallPiece, offered: OfferedTool) -> None:
        self.item: Json = _call("custom_tool_call", item_id, call, offered) | {"input": ""}
        self._place = {"item_id": item_id, "output_index": index}
        self._arguments = _Arguments()
        self._input = CustomInput()

    def begin(self) -> Iterator[Event]:
        return iter(())

    def push(self, piece: str) -> Iterator[Event]:
        self._arguments.push(piece)
        yield from self._tell(self._input.push(piece))

    def end(self, status: Status) -> Iterator[Event]:
        yield from self._tell(self._input.flush())
        self.item["status"] = self._arguments.status(status)
        yield {"type": "response.custom_tool_call_input.done", **self._place, "input": self.item["input"]}

    def _tell(self, text: str) -> Iterator[Event]:
        if text:
            self.item["input"] += text
            yield {"type": "response.custom_tool_call_input.delta", **self._place, "delta": text}


def without_logprobs(item: Json) -> Json:
    """An item of an answer as it is when read from the log, which has no log-probabilities."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _message(item_id: str) -> Json:
    return {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _thought(item_id: str) -> Json:
    said: Json = {"summary": [], "content": [], "encrypted_content": None}
    return {"id": item_id, "type": "reasoning", "status": "in_progress", **said}


def _call(kind: str, item_id: str, call: CallPiece, offered: OfferedTool | None) -> Json:
    """A call. A name that was not offered is passed on as the model wrote it."""
    name = (call.name or "") if offered is None else offered.name
    namespace = {} if offered is None or offered.namespace is None else {"namespace": offered.namespace}
    said = {"call_id": call.call_id or "", "name": name, **namespace}
    return {"id": item_id, "type": kind, "status": "in_progress", **said}
