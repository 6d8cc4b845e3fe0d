"""The answers of a request: what they are held to, and their text as content, thoughts and calls.

Calls are found in the text alone, so a turn that goes on at another replica, or is repeated from the log, has the same
calls. Their ids are derived from the turn for the same reason, unless the model has written them itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
from base64 import b32encode
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from serving.front.api.answers.held import HeldAnswer
from serving.front.api.answers.tools import ToolUse
from serving.text.answer_parsers import answer_parser
from serving.text.answer_pieces import AnswerParser, CallPiece, Piece, Thought
from serving.text.reasoning.formats import ReasoningName, shown_tokens
from serving.wire.turns import ModelInfo, OutputConstraint, TurnCall, TurnEvent, TurnFinish

_ID_CHARS = 9
"""Mistral's templates accept only ids of nine letters and digits."""


def reads_thoughts(model: ModelInfo, constraint: OutputConstraint | None) -> ReasoningName | None:
    """The format in which thoughts are looked for in the answer. An answer with a constraint has none."""
    return None if constraint is not None else model.reasoning


def answer_fields(model: ModelInfo, held: HeldAnswer | None, tools: ToolUse) -> dict[str, Any]:
    """Fields of a TurnCall: what its answer is held to, and the special tokens that stay in its text because they mark
    calls and thoughts. Raises ServiceError, which names the field."""
    constraint = tools.constraint(held)
    reasoning = reads_thoughts(model, constraint)
    of_thoughts = () if reasoning is None else shown_tokens(reasoning)
    return {
        "constraint": constraint,
        "strict_calls": tools.strict_calls(model, constraint),
        "shown_tokens": (*tools.shown_tokens, *of_thoughts),
    }


Scope = str | tuple[str, str]
"""What the ids of a choice's calls are derived from: the id of its request, or the tenant and the id of its session."""


def scope_of(call: TurnCall) -> Scope:
    """Unique to the choice. In a session it is the same for every request that repeats a turn."""
    return call.request_id if call.session is None else (call.tenant, call.session.session_id)


@dataclass(slots=True)
class AnswerPart:
    """What an event adds to a choice, or the whole choice: its pieces in the order in which they came. There is at most
    one piece of each call: some clients merge the deltas of a chunk by their position. The first piece of each call has
    an id."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def content(self) -> str | None:
        texts = [piece for piece in self.pieces if isinstance(piece, str)]
        return "".join(texts) if texts else None

    @property
    def reasoning(self) -> str | None:
        """What the model thought before its answer, if its format separates the two."""
        thoughts = [piece.text for piece in self.pieces if isinstance(piece, Thought)]
        return "".join(thoughts) if thoughts else None

    @property
    def calls(self) -> list[CallPiece]:
        return [piece for piece in self.pieces if isinstance(piece, CallPiece)]

    @property
    def is_text(self) -> bool:
        """Whether there is nothing but content, or nothing."""
        return all(isinstance(piece, str) for piece in self.pieces)

    def add(self, piece: Piece, scope: str) -> None:
        """`scope`: what the ids of calls are derived from."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(piece, str):
            if isinstance(last, str):
                self.pieces[-1] = last + piece
            else:
                self.pieces.append(piece)
        elif isinstance(piece, Thought):
            if isinstance(last, Thought):
                self.pieces[-1] = Thought(last.text + piece.text)
            else:
                self.pieces.append(piece)
        elif piece.name is not None:
            call_id = piece.call_id or _call_id(scope, piece.index)
            self.pieces.append(dataclasses.replace(piece, call_id=call_id))
        elif isinstance(last, CallPiece) and last.index == piece.index:
            self.pieces[-1] = dataclasses.replace(last, arguments=last.arguments + piece.arguments)
        else:
            self.pieces.append(piece)


class AnswerReader:
    """Splits the text of one choice into content, thoughts and calls. `reasoning` is the format of the model's thoughts
    (None: they are not looked for)."""

    def __init__(self, scope: Scope, tools: ToolUse, reasoning: ReasoningName | None) -> None:
        self._scope = scope
        self._tools = tools
        self._reasoning = reasoning
        self._parser: AnswerParser | None = None
        self._has_calls = False

    def read(self, output: TurnEvent) -> AnswerPart:
        """What the choice's next event, or the whole choice, adds."""
        calls = self._tools.read_format
        if calls is None and self._reasoning is None:
            return AnswerPart([output.text])
        if self._parser is None:
            schemas = self._tools.schemas
            self._parser = answer_parser(calls, schemas, self._reasoning, inside=output.in_thought)
        pieces = self._parser.push(output.text)
        if output.finish is not None:
            pieces += self._parser.flush()
        scope = self._scope if isinstance(self._scope, str) else repr((*self._scope, output.turn_index))
        part = AnswerPart()
        for piece in pieces:
            part.add(piece, scope)
        self._has_calls = self._has_calls or bool(part.calls)
        return part

    @property
    def is_broken_off(self) -> bool:
        """Whether the model broke off one of the choice's calls. To be read after the choice's last part."""
        return self._parser is not None and self._parser.is_broken_off

    def finish(self, output: TurnEvent) -> TurnFinish | None:
        """How the choice ended. To be called after `read`: a stop after calls becomes "tool_calls". If a call was
        broken off it stays a stop, because clients run the calls of an answer that ends with "tool_calls"."""
        finish = output.finish
        if finish is None or finish.reason != "stop" or not self._has_calls or self.is_broken_off:
            return finish
        return replace(finish, reason="tool_calls")


def _call_id(scope: str, index: int) -> str:
    digest = hashlib.sha256(f"{scope}/{index}".encode()).digest()
    return b32encode(digest).decode().lower()[:_ID_CHARS]
