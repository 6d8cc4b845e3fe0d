"""What front ends and replicas send each other arrives unchanged, also between neighbouring versions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import fields, replace

from cache.slots import KVPlace
from controllers.records import ForkOrder
from engine.api import LogprobParams, SamplingParams, TokenLogprob
from serving.wire import turns
from serving.wire.calls import (
    ANSWERS,
    Abort,
    Answer,
    AnyCall,
    Audit,
    CloseSession,
    Describe,
    Detokenize,
    Drain,
    Flush,
    ForkSession,
    GetModelInfo,
    KeepNote,
    MetricsText,
    MoveSession,
    PlantFault,
    Request,
    RewindSession,
    RunAdaptedTurn,
    RunTurn,
    SessionPlaces,
    Tokenize,
    UnreadableMessage,
    answer_of,
    call_of,
    decode_replies,
    decode_request,
    encode_replies,
    encode_request,
    result_of,
)
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    ForkedSession,
    ModelInfo,
    MovedSession,
    OutputConstraint,
    ResumedTurn,
    ServiceError,
    SessionTurn,
    TextLogprob,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
    TurnCall,
    TurnEvent,
    TurnFinish,
)

TEXT = TextLogprob(TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.5))), b"\xe2", (b"\xe2", b"b"))
EVENT = TurnEvent(
    text="a\ufffd",
    token_ids=(7, 8),
    prompt_tokens=3,
    cached_tokens=2,
    completion_tokens=2,
    logprobs=(TEXT,),
    input_logprobs=(TEXT, TextLogprob(TokenLogprob(1, None), b"")),
    finish=TurnFinish("stop", 2, "m"),
    error=ErrorInfo(409, "c", "m", "p", 1.5),
    draft_tokens=4,
    accepted_draft_tokens=1,
    turn_index=5,
    replayed=True,
    tokenizer="t",
    open_key="o",
    ended_s=1_700_000_000.5,
)
TURN = TurnCall(
    "r",
    ChatPrompt(
        ({"role": "user", "content": [{"type": "text", "text": "x"}]},), {"k": None}, ({"type": "f"},)
    ),
    SamplingParams(temperature=0.5, seed=9, logit_bias={7: float("-inf")}, stop_token_ids=frozenset({1, 2})),
    seed=3,
    max_new_tokens=8,
    stop=("x",),
    trim_stop=False,
    skip_special_tokens=False,
    shown_tokens=("<t>",),
    logprobs=LogprobParams(top=2, input_start=1),
    constraint=OutputConstraint("regex", "a+"),
    session=SessionTurn("s", "key", False, 1, "o"),
    tenant="t",
    resumed=ResumedTurn((7,), (TEXT,), (TEXT,), 5, "t", "o"),
)
CALLS: list[AnyCall] = [
    RunTurn(TURN, 3),
    RunTurn(TurnCall("r", TextPrompt("x"), SamplingParams()), None),
    RunTurn(TurnCall("r", TokenPrompt((1, 2)), SamplingParams()), None),
    RunAdaptedTurn(TurnCall("r", TextPrompt("x"), SamplingParams(), adapter="a"), 3),
    CloseSession("s", 2),
    ForkSession("s", 2, ForkOrder("c", "k", 5, 1.5)),
    RewindSession("s", 2, 7),
    MoveSession("s", 2, "b", 1),
    MoveSession("s", 2, None, 2),
    KeepNote("s", 2, b"note", "key", 3),
    SessionPlaces(("s", "t")),
    Abort(None, "t"),
    Flush(),
    Drain(),
    Audit(),
    Describe(),
    MetricsText(),
    PlantFault("leak_page", 5.0, "s", 1.5),
    GetModelInfo(),
    Tokenize(ChatPrompt(({"role": "user", "content": "hi"},), {"a": 1}), True, False),
    Tokenize(TextPrompt("hi"), False, True),
    Detokenize((1, 2), True),
]
RESULTS: list[tuple[AnyCall, Any]] = [
    (CloseSession("s", 2), True),
    (ForkSession("s", 2, ForkOrder("c", "k")), ForkedSession("c", 3, 2)),
    (RewindSession("s", 2, 0), None),
    (MoveSession("s", 2, "b", 2), MovedSession("a", "b", 3)),
    (KeepNote("s", 2, b"", "k", None), None),
    (SessionPlaces(("s",)), {"s": KVPlace("device", 3), "t": KVPlace("host", None)}),
    (Abort("r", "t"), 4),
    (Flush(), False),
    (Drain(), None),
    (Audit(), {"clean": True, "pools": {"full": {"free": 1}}}),
    (Describe(), {"live_turns": 3}),
    (MetricsText(), "# HELP"),
    (PlantFault(), {"mended": ["leak_page"]}),
    (GetModelInfo(), ModelInfo("m", "p", "tp", 100, 50, 12, "hermes", aliases=("a",), adapters={"b": "q"})),
    (Tokenize(TextPrompt("hi"), True, True), TokenizedPrompt((1, 2), ("h", "i"))),
    (Detokenize((1, 2), False), "hi"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_calls_arrive_as_they_were(call: AnyCall) -> None:
    assert decode_request(encode_request(Request(3, call))) == Request(3, call)


def test_every_call_is_among_them() -> None:
    assert {type(call) for call in CALLS} == set(get_args(AnyCall))
    turns = {RunTurn, RunAdaptedTurn}
    assert {type(call) for call, _ in RESULTS} == set(ANSWERS) == set(get_args(AnyCall)) - turns


class TurnWithoutAdapters(msgspec.Struct, tag="turn", tag_field="call"):
    """RunTurn as a version without adapters knows it."""

    turn: msgspec.Raw
    epoch: int | None


def test_a_version_without_adapters_does_not_read_a_turn_that_has_one() -> None:
    """It skips fields that it does not know. It used to answer such turns with the model itself, and to commit them."""
    older = msgspec.msgpack.Decoder(tuple[int, TurnWithoutAdapters])
    plain = TurnCall("r", TextPrompt("x"), SamplingParams())
    assert older.decode(encode_request(Request(1, call_of(plain, 3))))[1].epoch == 3
    with pytest.raises(msgspec.ValidationError, match="adapted_turn"):
        older.decode(encode_request(Request(1, call_of(replace(plain, adapter="a"), 3))))


def test_a_cancelled_call_is_a_number() -> None:
    assert decode_request(encode_request(Request(3))) == Request(3)


def test_read_only_mappings_travel() -> None:
    sampling = SamplingParams(logit_bias=MappingProxyType({1: 2.0}))
    call = RunTurn(TurnCall("r", TokenPrompt((1,)), sampling), None)
    received = decode_request(encode_request(Request(0, call))).call
    assert isinstance(received, RunTurn)
    assert received.turn.sampling.logit_bias == {1: 2.0}


def test_events_arrive_as_they_were() -> None:
    news = [(4, EVENT), (5, answer_of(7)), (4, TurnEvent(text="b"))]
    assert decode_replies(encode_replies(news)) == news


@pytest.mark.parametrize(("call", "result"), RESULTS, ids=lambda value: type(value).__name__)
def test_answers_arrive_as_they_were(call: AnyCall, result: Any) -> None:
    ((_, answer),) = decode_replies(encode_replies([(0, answer_of(result))]))
    assert isinstance(answer, Answer)
    assert result_of(call, answer) == result


def test_an_error_is_raised_where_it_arrives() -> None:
    with pytest.raises(ServiceError) as caught:
        result_of(Flush(), answer_of(ErrorInfo(503, "gone", "m")))
    assert caught.value.info == ErrorInfo(503, "gone", "m")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xc0\x02\x03", encode_replies([(1, EVENT)])[:-1]])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    for decode in (decode_request, decode_replies):
        with pytest.raises(UnreadableMessage):
            decode(body)


def records() -> list[type[msgspec.Struct]]:
    return [
        kind for kind in vars(turns).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]


@pytest.mark.parametrize("kind", records(), ids=lambda kind: kind.__name__)
def test_a_record_of_a_version_that_has_more_is_read(kind: type[msgspec.Struct]) -> None:
    tag = getattr(kind.__struct_config__, "tag", None)
    config = {"array_like": kind.__struct_config__.array_like, "tag": tag}
    every = fields(kind)
    if all(each.required for each in every):
        same = [(each.name, each.type) for each in every]
        newer = msgspec.defstruct("Newer", [*same, ("added", int, 7)], **config)
    else:
        newer = msgspec.defstruct("Newer", [("added", int, 7)], bases=(kind,), **config)
    required = {each.name: sample_of(each.type) for each in fields(kind) if each.required}
    sent = msgspec.msgpack.encode(newer(**required))
    assert msgspec.msgpack.decode(sent, type=kind) == kind(**required)


def sample_of(kind: Any) -> Any:
    """Some value of a field's type."""
    samples: dict[Any, Any] = {
        str: "s",
        int: 1,
        float: 1.0,
        bool: True,
        bytes: b"b",
        SamplingParams: SamplingParams(logit_bias={}),
    }
    if kind in samples:
        return samples[kind]
    if kind is TokenLogprob:
        return TokenLogprob(1, None)
    text = str(kind)
    if "ChatPrompt" in text:
        return TokenPrompt((1,))
    if "Literal" in text:
        return get_args(kind)[0]
    if "None" in text:
        return None
    return ()


def test_a_turn_event_of_a_version_that_has_less_is_read() -> None:
    """Missing fields get their defaults."""
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(EVENT))
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(whole[:6]), type=TurnEvent)
    assert (read.text, read.completion_tokens, read.finish, read.open_key) == (EVENT.text, 2, None, None)
