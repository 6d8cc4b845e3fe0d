"""Calls of strict functions in a free answer: where the constraint begins to hold, to what, and where it does not."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from typing import Any, get_args

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from engine.api import InvalidRequest
from serving.grammars import grammar_trial
from serving.grammars.constraints import ConstraintCompiler
from serving.grammars.strict_calls import StrictCallsConstraint
from serving.text.answer_parsers import answer_parser
from serving.text.answer_pieces import CallPiece, Piece
from serving.text.reasoning.formats import ReasoningName
from serving.text.text import TextProcessor
from serving.text.tool_calls.formats import FormatName, tool_format
from serving.wire.turns import OutputConstraint
from tests.unit.serving.held_outputs import allowed_ids, grammars_of, takes
from tests.unit.serving.small_tokenizer import byte_level_tokenizer, piece_tokenizer

NAMES: tuple[FormatName, ...] = get_args(FormatName)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0}, "city": {"enum": ["Bern", "Köln"]}},
    "required": ["days", "city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "additionalProperties": False}
FUNCTIONS = {"get_weather": SCHEMA, "other": EMPTY}
HEADS: dict[FormatName, str] = {
    "hermes": "<tool_call>\n{",
    "llama3": "<|python_tag|>{",
    "mistral": "[TOOL_CALLS][{",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="g',
    "mistral_v11": "[TOOL_CALLS]",
    "mistral_call_id": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>\n<function=",
    "glm45": "<tool_call>g",
    "glm47": "<tool_call>g",
    "gpt_oss": "<|channel|>commentary to=functions.",
    "pythonic": "<|python_start|>[g",
}
"""Texts that certainly begin a call."""
TALK: dict[FormatName, list[str]] = {
    "hermes": ["`<tool_call>` tag", "<tool_call>[", "<tool", "{", "<tool_call> (1)"],
    "llama3": ["`<|python_tag|>`", "<|python_tag|>print(1)", ' {"name": "get_weather"'],
    "mistral": ["[TOOL_CALLS] are", "[TOOL", "[TOOL_CALLS](1)", '[{"name": "get_weather"}]'],
    "deepseek_v3": ["<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool"],
    "deepseek_v31": ["<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool"],
    "deepseek_v32": [
        "<｜DSML｜function_calls>",
        "<｜DSML｜invoke",
        "｜DSML｜",
        "<｜DSML｜invoke name=",
        'name="g',
    ],
    "mistral_v11": ["[TOOL", "[ARGS]", "TOOL_CALLS]"],
    "mistral_call_id": ["[TOOL", "[ARGS]", "[CALL_ID]", "TOOL_CALLS]"],
    "qwen3_coder": ["<tool_call>", "<function", "<parameter=a>"],
    "glm45": ["`<tool_call>` tag", "<tool_call><", "<arg_key>"],
    "glm47": ["`<tool_call>` tag", "<tool_call><", "<arg_key>"],
    "pythonic": ["`<|python_start|>`", "<|python_start|>print(1)", "[get_weather(", "<|python_start|>[1]"],
    "gpt_oss": ["to=functions.get_weather", "<|channel|>final<|message|>to=functions.get_weather", "<|end|>"],
}
"""Texts that begin no call."""


@cache
def tokenizer(name: FormatName, *, special: bool, pieces: bool = False) -> PreTrainedTokenizerFast:
    made = piece_tokenizer() if pieces else byte_level_tokenizer()
    if special:
        marks = [*tool_format(name).shown_tokens, "<think>", "</think>"]
        made.add_special_tokens({"additional_special_tokens": marks})
    return made


def source(
    name: FormatName,
    functions: dict[str, Any] = FUNCTIONS,
    reasoning: ReasoningName | None = None,
    **must: bool,
) -> str:
    told = [
        {"name": key, "parameters": schema, "must": must.get(key, False)} for key, schema in functions.items()
    ]
    return json.dumps({"format": name, "reasoning": reasoning, "functions": told})


grammars = cache(grammars_of)


@cache
def compiled(made: PreTrainedTokenizerFast, wanted: str) -> Any:
    return grammars(made).compile(OutputConstraint("strict_calls", wanted))


def begun(
    made: PreTrainedTokenizerFast, name: FormatName, reasoning: ReasoningName | None = None
) -> StrictCallsConstraint:
    constraint = grammars(made).begin(compiled(made, source(name, reasoning=reasoning)))
    assert isinstance(constraint, StrictCallsConstraint)
    return constraint


def ids_of(made: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(made.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def say(constraint: StrictCallsConstraint, ids: list[int]) -> list[bool]:
    """Whether the constraint holds after each of these tokens. It must not hold before any of them."""
    held = []
    for token_id in ids:
        assert not constraint.holds
        constraint.accept(token_id)
        held.append(constraint.holds)
    return held


def any_call(constraint: StrictCallsConstraint, chance: random.Random) -> list[int]:
    """Random allowed tokens, as long as the constraint holds."""
    ids: list[int] = []
    while constraint.holds:
        ids.append(chance.choice(allowed_ids(constraint)))
        constraint.accept(ids[-1])
    return ids


def told(made: PreTrainedTokenizerFast, name: FormatName, ids: list[int]) -> list[Piece]:
    """What the client gets of an answer with these tokens."""
    text = TextProcessor(made, vocab_size=len(made), max_context_len=1000)
    shown = text.output_text(shown=tool_format(name).shown_tokens).push(ids)
    parser = answer_parser(name, FUNCTIONS, None, inside=False)
    return parser.push(shown) + parser.flush()


def calls_of(pieces: list[Piece]) -> list[tuple[str, Any]]:
    calls: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            calls.setdefault(piece.index, []).append(piece)
    return [(each[0].name or "", json.loads("".join(p.arguments for p in each))) for each in calls.values()]


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_from_its_opening_on_a_call_fits_its_function(name: FormatName, special: bool) -> None:
    made = tokenizer(name, special=special)
    for seed in range(6):
        constraint = begun(made, name)
        opening = ids_of(made, HEADS[name])
        lead = ids_of(made, "Rex: ") if name != "gpt_oss" else []
        held = say(constraint, lead + opening)
        assert held[-1]
        assert not any(held[:-1])
        ids = [*lead, *opening, *any_call(constraint, random.Random(seed))]
        if not constraint.complete:
            say(constraint, opening)
            ids += [*opening, *any_call(constraint, random.Random(100 + seed))]
        else:
            assert name == "gpt_oss"
        calls = calls_of(told(made, name, ids))
        assert len(calls) >= (1 if name == "gpt_oss" else 2)
        for function, arguments in calls:
            jsonschema.validate(arguments, FUNCTIONS[function])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("deepseek")])
def test_the_same_in_pieces(name: FormatName) -> None:
    made = tokenizer(name, special=False, pieces=True)
    constraint = begun(made, name)
    opening = ids_of(made, HEADS[name])
    assert say(constraint, opening)[-1]
    for function, arguments in calls_of(told(made, name, opening + any_call(constraint, random.Random(1)))):
        jsonschema.validate(arguments, FUNCTIONS[function])


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_makes_no_call_is_never_held(name: FormatName, special: bool) -> None:
    made, chance = tokenizer(name, special=special), random.Random(7)
    scraps = [*TALK[name], "Rex is a dog. ", "if a < b { [1] }", "\n", "<", "😀", "if not x:"]
    for _ in range(30):
        words = [chance.choice(scraps) for _ in range(12)]
        constraint = begun(made, name)
        held = say(constraint, [token for word in ["My dog. ", *words] for token in ids_of(made, word)])
        assert not any(held), words
        assert len(constraint._watch._text) <= 512


def test_most_tokens_of_an_answer_cost_a_look() -> None:
    """The constraint keeps nothing of tokens that begin no mark."""
    made = tokenizer("hermes", special=True)
    constraint = begun(made, "hermes")
    loud = constraint._calls.opening.loud
    assert len(loud) < len(made) / 8
    say(constraint, ids_of(made, "Rex is a good dog "))
    assert constraint._watch._ids == []
    say(constraint, ids_of(made, "a < b, and more"))
    assert constraint._watch._ids == []


BARE = '{"name": "get_weather"'


def test_a_bare_call_is_one_only_where_the_answer_begins() -> None:
    made = tokenizer("llama3", special=True)
    assert say(begun(made, "llama3"), ids_of(made, f" {BARE}"))[-1]
    assert not any(say(begun(made, "llama3"), ids_of(made, f"So {BARE}")))
    assert not any(
        say(begun(made, "llama3"), ids_of(made, '{"name": "Bob", "age": 3} <|python_tag|> {')[:-2])
    )
    json_answer = begun(made, "llama3")
    assert say(json_answer, ids_of(made, '{"name": "Bob"} <|python_tag|> {'))[-1], "a mark counts anywhere"
    constraint = begun(made, "llama3")
    say(constraint, ids_of(made, BARE))
    any_call(constraint, random.Random(3))
    assert say(constraint, ids_of(made, "; " + BARE))[-1], "nor does a second one need a mark"


def test_a_list_of_calls_needs_no_mark_where_the_answer_begins() -> None:
    made, free = tokenizer("pythonic", special=True), "[x for x in get_weather(days=1)]"
    for seed in range(4):
        constraint = begun(made, "pythonic")
        head = ids_of(made, "\n[ get_weather(")
        assert say(constraint, head)[-1]
        ids = [*head, *any_call(constraint, random.Random(seed))]
        again = ids_of(made, "\n[other(")
        assert say(constraint, again)[-1], "nor does a second one"
        ids += [*again, *any_call(constraint, random.Random(seed))]
        calls = calls_of(told(made, "pythonic", ids))
        assert [calls[0][0], len(calls) >= 2] == ["get_weather", True]
        for function, arguments in calls:
            jsonschema.validate(arguments, FUNCTIONS[function])
    for text in ("So [get_weather(days=1)]", free, "[1, get_weather(days=1)]", "[unknown(a=1), get_weather("):
        assert not any(say(begun(made, "pythonic"), ids_of(made, text))), text


@pytest.mark.parametrize("name", ["deepseek_v3", "hermes", "qwen3_coder"])
@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
def test_what_a_thought_has_is_no_call(name: FormatName, special: bool) -> None:
    made = tokenizer(name, special=special)
    head = HEADS[name]
    for opened in (True, False):
        constraint = begun(made, name, "think")
        if opened:
            constraint.begin_in_thought()
        thought = f"{'' if opened else '<think>'}I say {head} {head} "
        assert not any(say(constraint, ids_of(made, thought)))
        assert say(constraint, ids_of(made, f"</think>\n\n{head}"))[-1]
    assert say(begun(made, name, "think"), ids_of(made, f"I say {head}"))[-1], "it began with no thought"
    assert say(begun(made, name), ids_of(made, f"<think>{head}"))[-1], "a model that does not think"


def test_what_a_function_is_not_called_holds_nothing() -> None:
    """The client has to find out that there is no such function. A strict function is recognized by its name, not by
    its arguments."""
    made = tokenizer("glm45", special=True)
    constraint = begun(made, "glm45")
    assert not any(say(constraint, ids_of(made, "<tool_call>unknown\n<arg_key>a</arg_key>")))
    assert say(constraint, ids_of(made, "<tool_call>o"))[-1]


UNENFORCED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name() -> None:
    made = tokenizer("hermes", special=True)
    compiler = ConstraintCompiler(made.backend_tokenizer, len(made))
    functions = {"fine": SCHEMA, "bad": UNENFORCED}
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(compiler.strict_calls(source("hermes", functions, fine=True, bad=True)))
    assert caught.value.param == "strict_calls"
    assert "bad: Unimplemented keys" in caught.value.message
    large = {"f": {"type": "object", "properties": {"a": {"const": 2**60}}}}
    with pytest.raises(InvalidRequest, match=r"f: .* is beyond"):
        asyncio.run(compiler.strict_calls(source("hermes", large, f=True)))


def test_one_that_need_not_be_enforced_is_free_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "CPU_S", 1)
    made = tokenizer("hermes", special=True)
    compiler = ConstraintCompiler(made.backend_tokenizer, len(made))
    wanted = source("hermes", {"fine": SCHEMA, "bad": UNENFORCED}, fine=True)
    for function, text in (("bad", '{"x": 1'), ("fine", '{"days": ')):
        constraint = asyncio.run(compiler.strict_calls(wanted))
        assert constraint is not None
        say(constraint, ids_of(made, "<tool_call>\n{"))
        assert takes(constraint, ids_of(made, f'"name": "{function}", "arguments": {text}'))
    multiples = {f"p{number}": {"multipleOf": 999_983 - number} for number in range(10)}  # some 30 s of work
    costly = {"f": {"type": "object", "properties": multiples}}
    assert asyncio.run(compiler.strict_calls(source("hermes", costly))) is None
