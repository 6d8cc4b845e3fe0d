"""The calls of a front end to a replica and their answers, as the bytes of messages on a channel between them.

A front end numbers its calls. A replica answers each call with one Answer, but a turn with events, of which the last
has a finish or an error. All that one engine step yields for the turns of a front end is one message.

The two ends may be of neighbouring versions. So fields are only ever added, at the end and with a default: a reader
skips fields that it does not know, and uses the default of those that are missing. A field that a reader must not skip
needs a call of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from cache.slots import KVPlace
from controllers.records import ForkOrder
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    ForkedSession,
    ModelInfo,
    MovedSession,
    ServiceError,
    TextPrompt,
    TokenizedPrompt,
    TurnCall,
    TurnEvent,
)

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, tag_field="call"):
    """Base of all calls; the tag names the method."""


class RunTurn(Call, frozen=True, tag="turn"):
    """Runs a turn at the owner's `epoch` (None: outside a session). Cancelling the call aborts the turn."""

    turn: TurnCall
    epoch: int | None


class RunAdaptedTurn(RunTurn, frozen=True, tag="adapted_turn"):
    """A turn with an adapter. A replica of a version without adapters would skip the field and answer with the model
    itself; this call it does not know, and refuses."""


class CloseSession(Call, frozen=True, tag="close_session"):
    """Ends a session that is held at `epoch`, now or when its turn ends. False if it is not held at that epoch."""

    session_id: str
    epoch: int


class ForkSession(Call, frozen=True, tag="fork_session"):
    """Starts a session from the first tokens of a parent that is owned at `epoch`."""

    parent_id: str
    epoch: int
    order: ForkOrder


class RewindSession(Call, frozen=True, tag="rewind_session"):
    """Keeps the first `length` tokens of a session that is owned at `epoch`. Repeated calls with the same `key` do so
    once."""

    session_id: str
    epoch: int
    length: int
    key: str = ""


class MoveSession(Call, frozen=True, tag="move_session"):
    """Moves a session that is owned at `epoch` to the replica `to`. None: to any other replica, unless the session has
    already moved since the caller found it at the epoch `found_at`."""

    session_id: str
    epoch: int
    to: str | None
    found_at: int


class KeepNote(Call, frozen=True, tag="keep_note"):
    """Commits an empty turn with a `note` in a session that is owned at `epoch`. Repeated calls with the same `key`
    commit it once. `expected_turn` is the number that the turn must have (None: any)."""

    session_id: str
    epoch: int
    note: bytes
    key: str
    expected_turn: int | None


class Abort(Call, frozen=True, tag="abort"):
    """Aborts the tenant's requests with this id (None: all of them). The answer is how many."""

    request_id: str | None
    tenant: str


class Flush(Call, frozen=True, tag="flush"):
    """Drops every cached prefix. False while requests run."""


class Drain(Call, frozen=True, tag="drain"):
    """Drains the replica, which ends once it is empty."""


class Audit(Call, frozen=True, tag="audit"):
    """Audits every KV page. The answer is JSON ready."""


class Describe(Call, frozen=True, tag="describe"):
    """Asks for the replica's figures, JSON ready."""


class SessionPlaces(Call, frozen=True, tag="session_places"):
    """Asks where the KV of these sessions is. Sessions without KV on the replica are left out of the answer."""

    session_ids: tuple[str, ...]


class MetricsText(Call, frozen=True, tag="metrics_text"):
    """Asks for the replica's metrics, in Prometheus' format."""


class PlantFault(Call, frozen=True, tag="plant_fault"):
    """Plants a fault if `debug.faults` is set. Without a `kind` it removes all faults. The answer is JSON ready."""

    kind: str | None = None
    for_s: float = 0.0
    session_id: str | None = None
    delay_s: float = 0.0


class GetModelInfo(Call, frozen=True, tag="model_info"):
    """Asks for what the protocols report of the served model."""


class Tokenize(Call, frozen=True, tag="tokenize"):
    """Asks for the tokens of a prompt."""

    prompt: ChatPrompt | TextPrompt
    add_special_tokens: bool
    with_token_strs: bool


class Detokenize(Call, frozen=True, tag="detokenize"):
    """Asks for the text of tokens."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool


AnyCall = (
    RunTurn
    | RunAdaptedTurn
    | CloseSession
    | ForkSession
    | RewindSession
    | MoveSession
    | KeepNote
    | Abort
    | Flush
    | Drain
    | Audit
    | Describe
    | SessionPlaces
    | MetricsText
    | PlantFault
    | GetModelInfo
    | Tokenize
    | Detokenize
)

ANSWERS: Mapping[type[Call], Any] = MappingProxyType(
    {
        CloseSession: bool,
        ForkSession: ForkedSession,
        RewindSession: None,
        MoveSession: MovedSession,
        KeepNote: None,
        Abort: int,
        Flush: bool,
        Drain: None,
        Audit: dict[str, Any],
        Describe: dict[str, Any],
        SessionPlaces: dict[str, KVPlace],
        MetricsText: str,
        PlantFault: dict[str, Any],
        GetModelInfo: ModelInfo,
        Tokenize: TokenizedPrompt,
        Detokenize: str,
    }
)
"""The type of each call's answer. A turn is answered with events instead."""


def call_of(turn: TurnCall, epoch: int | None) -> RunTurn:
    """The call that runs the turn at the owner's `epoch`."""
    return RunAdaptedTurn(turn, epoch) if turn.adapter else RunTurn(turn, epoch)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A front end's call, with its number. Without `call` it cancels the call of that number."""

    number: int
    call: AnyCall | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to a call that is not a turn: its encoded result, or an error."""

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    error: ErrorInfo | None = None


Replies = list[tuple[int, Answer | TurnEvent]]
"""A replica's answers and events with the numbers of their calls. Those of one call are in order."""


class UnreadableMessage(Exception):
    """The bytes are not a message that this version can read."""


class UnknownCall(Exception):
    """A request of another version, with a call that this version does not know."""

    def __init__(self, number: int) -> None:
        super().__init__(f"call {number}")
        self.number = number


class _Numbered(msgspec.Struct, array_like=True):
    """The part of a request that every version can read."""

    number: int


def _plain(value: Any) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_REQUESTS = msgspec.msgpack.Decoder(Request)
_NUMBERS = msgspec.msgpack.Decoder(_Numbered)
_REPLIES = msgspec.msgpack.Decoder(Replies)
_ANSWERS = {call: msgspec.msgpack.Decoder(answer) for call, answer in ANSWERS.items()}


def encode_request(request: Request) -> bytes:
    return _ENCODER.encode(request)


def decode_request(body: bytes) -> Request:
    """Raises UnknownCall and UnreadableMessage."""
    try:
        return _REQUESTS.decode(body)
    except msgspec.MsgspecError as error:
        raise UnknownCall(_decoded(_NUMBERS, body).number) from error


def encode_replies(replies: Replies) -> bytes:
    return _ENCODER.encode(replies)


def decode_replies(body: bytes) -> Replies:
    """Raises UnreadableMessage."""
    return _decoded(_REPLIES, body)


def answer_of(result: Any) -> Answer:
    """The Answer with this result, or with this error if `result` is an ErrorInfo."""
    if isinstance(result, ErrorInfo):
        return Answer(error=result)
    return Answer(msgspec.Raw(_ENCODER.encode(result)))


def result_of(call: Call, answer: Answer) -> Any:
    """The result in the call's answer. Raises ServiceError if that is an error, and UnreadableMessage."""
    if answer.error is not None:
        raise ServiceError(answer.error)
    return _decoded(_ANSWERS[type(call)], answer.result)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise UnreadableMessage(str(error)) from error
