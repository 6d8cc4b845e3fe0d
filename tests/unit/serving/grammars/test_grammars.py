"""Constraints from schemas and regular expressions: what they allow, what is refused, and what is kept of them."""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import re
import statistics
import threading
import time
import tracemalloc
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.api import ConstraintFailed, InvalidRequest, TokenConstraint
from serving.grammars import constraints, grammar_constraint, grammar_trial, grammars
from serving.grammars.constraints import ConstraintCompiler
from serving.grammars.grammar_constraint import MAX_REASON_CHARS
from serving.grammars.grammar_trial import TOO_MUCH, GrammarTrial
from serving.text.text import TextProcessor
from serving.wire.turns import OutputConstraint
from tests.unit.serving.held_outputs import allowed_ids
from tests.unit.serving.json_schemas import schemas
from tests.unit.serving.small_tokenizer import END_ID, byte_level_tokenizer, piece_tokenizer

CHAT = Path(__file__).parents[4] / "assets" / "models" / "kedge-chat"
TEXT = TextProcessor.load(str(CHAT), vocab_size=2048, max_context_len=2048)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def text_of(text: TextProcessor, token_id: int) -> str:
    return text.token_text(token_id).decode("utf-8", "surrogateescape")


def compiler(text: TextProcessor = TEXT, vocab_size: int = 2048) -> ConstraintCompiler:
    return ConstraintCompiler(text.tokenizer, vocab_size)


COMPILER = compiler()


def schema(source: object) -> OutputConstraint:
    return OutputConstraint("json_schema", source if isinstance(source, str) else json.dumps(source))


def calls_with(parameters: object) -> OutputConstraint:
    functions = [{"name": "f", "parameters": parameters}]
    source = {"format": "pythonic", "functions": functions, "parallel": True, "answer": None}
    return OutputConstraint("tool_calls", json.dumps(source))


def regex(source: str) -> OutputConstraint:
    return OutputConstraint("regex", source)


def begun(wanted: OutputConstraint, by: ConstraintCompiler = COMPILER) -> TokenConstraint:
    return asyncio.run(by.compile(wanted))


def feed(constraint: TokenConstraint, text: str) -> None:
    tokenizer = TEXT.tokenizer
    assert tokenizer is not None
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        assert token_id in allowed_ids(constraint), text_of(TEXT, token_id)
        constraint.accept(token_id)


def refused(wanted: OutputConstraint, by: ConstraintCompiler = COMPILER) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        begun(wanted, by)
    assert caught.value.param == wanted.kind
    assert len(caught.value.message) < MAX_REASON_CHARS + 60
    assert "\n" not in caught.value.message
    return caught.value


def test_a_schema_is_followed_to_its_end() -> None:
    constraint = begun(schema(PERSON))
    assert {text_of(TEXT, token_id)[0] for token_id in allowed_ids(constraint)} == {"{"}
    feed(constraint, '{"name": "Rex", "age": 1')
    assert not constraint.may_end
    assert not constraint.complete
    feed(constraint, "2}")
    assert constraint.may_end
    assert constraint.complete


def test_where_it_may_end_and_may_go_on() -> None:
    constraint = begun(regex("ab*"))
    assert not constraint.may_end
    feed(constraint, "abb")
    assert constraint.may_end
    assert not constraint.complete
    assert {text_of(TEXT, token_id)[0] for token_id in allowed_ids(constraint)} == {"b"}


@pytest.mark.parametrize("pattern", ["[a-c]{2,4}x?", "(yes|no|perhaps)", "[0-9]+\\.[0-9]{2}", "a|ab|abc"])
def test_just_the_tokens_that_leave_a_way_on_are_allowed(pattern: str) -> None:
    """The expected tokens come from trying every token as the beginning of a matching text."""
    words = {
        "[a-c]{2,4}x?": lambda text: re.fullmatch("[a-c]{1,4}|[a-c]{2,4}x", text),
        "(yes|no|perhaps)": lambda text: any(word.startswith(text) for word in ("yes", "no", "perhaps")),
        "[0-9]+\\.[0-9]{2}": lambda text: re.fullmatch("[0-9]+(\\.[0-9]{0,2})?", text),
        "a|ab|abc": lambda text: "abc".startswith(text),
    }
    constraint = begun(regex(pattern))
    fits = [
        token for token in range(3, 2048) if text_of(TEXT, token) and words[pattern](text_of(TEXT, token))
    ]
    assert allowed_ids(constraint) == fits


@pytest.mark.parametrize("wanted", [regex("(?s:.*)"), schema({"type": "string"}), schema({})])
def test_control_tokens_are_never_text(wanted: OutputConstraint) -> None:
    constraint = begun(wanted)
    if wanted != schema({}):
        feed(constraint, '"')
    allowed = allowed_ids(constraint)
    assert allowed
    assert not {0, 1, 2} & set(allowed)


def test_tokens_that_only_the_model_has_are_never_allowed() -> None:
    constraint = begun(regex("(?s:.*)"), compiler(vocab_size=3001))
    assert len(constraint.allowed()) == 376
    assert max(allowed_ids(constraint)) < 2048


def test_vocabularies_of_other_kinds() -> None:
    for tokenizer, size in ((byte_level_tokenizer(), 1000), (piece_tokenizer(), 300)):
        text = TextProcessor(tokenizer, vocab_size=size, max_context_len=512)
        constraint = begun(regex("[0-9]x?"), compiler(text, size))
        shown = {text_of(text, token_id) for token_id in allowed_ids(constraint)}
        assert shown
        assert shown <= {*"0123456789"}
        assert END_ID not in allowed_ids(constraint)


BAD = [
    (schema('{"type": '), "EOF"),
    (schema({"type": "strin"}), "strin"),
    (schema({"type": 5}), "type"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"not": {"type": "string"}}), "not"),
    (schema({"if": {"type": "string"}, "then": {"minLength": 2}}), "if"),
    (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (schema({"$ref": "http://example.com/x.json"}), "example.com"),
    (schema({"$ref": "#/$defs/none"}), "none"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look"),
    (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    (schema('{"type":"array","items":' * 1000 + "{}" + "}" * 1000), "recursion"),
    (
        schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}),
        "uniqueItems",
    ),
    (schema({"enum": [1, {"a": 2**53 + 1}]}), "9007199254740993 is beyond 2**53"),
    (calls_with({"properties": 5}), "no JSON schema"),
    (regex("(a"), "unclosed group"),
    (regex("(?<=a)b"), "look"),
    (regex("a{3,1}"), "repetition"),
    (regex("(" * 3000 + ")" * 3000), "nest"),
    (regex("\ud800"), "surrogates"),
]


@pytest.mark.parametrize(("wanted", "reason"), BAD)
def test_what_cannot_be_enforced_is_refused_with_the_reason(wanted: OutputConstraint, reason: str) -> None:
    assert reason in refused(wanted).message


def test_without_a_tokenizer_nothing_can_be_enforced() -> None:
    text = TextProcessor(None, vocab_size=10, max_context_len=10)
    assert "no tokenizer" in refused(schema({}), compiler(text, 10)).message


def test_one_turn_does_not_lead_another_on() -> None:
    by = compiler()
    first, second = begun(schema(PERSON), by), begun(schema(PERSON), by)
    feed(first, '{"name": "A')
    feed(second, '{"name": "Rex", "age": 3}')
    assert second.complete
    assert not first.complete
    feed(first, '", "age": 3}')


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    constraint = begun(regex("a"))
    with pytest.raises(ConstraintFailed):
        constraint.accept(END_ID)


def test_the_last_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "CACHED_GRAMMARS", 2)
    by = compiler()
    for source in ("a", "b", "a", "c", "a", "b"):
        begun(regex(source), by)
    assert [kept.source for kept in by._compiled] == ["a", "b"]


def test_of_a_refused_grammar_only_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients could fill a replica's memory with grammars that are refused: all of their text was kept."""
    monkeypatch.setattr(GrammarTrial, "refusal", lambda *_: TOO_MUCH)
    by = compiler()
    refused(regex("a"), by)
    tracemalloc.start()
    try:
        for number in range(50):
            refused(regex(f"{number}{'a' * 60_000}"), by)
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 10 * 60_000


def test_a_lexer_that_others_have_filled_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a grammar share its lexer and the limit of the lexer's states. Earlier turns must not use it up for
    later ones."""
    monkeypatch.setattr(grammars, "LIMITS", grammars.LLParserLimits(max_lexer_states=3000))
    by, wanted = compiler(), regex("(a|b)*a(a|b){25}")
    generator = np.random.default_rng(1)
    filled = False
    for _ in range(300):
        constraint = begun(wanted, by)
        try:
            for _ in range(40):
                constraint.accept(int(generator.choice(allowed_ids(constraint))))
        except ConstraintFailed:
            filled = True
    assert filled


def test_a_grammar_that_is_costly_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token took the engine's thread 5 ms, which every other turn waited for. 6,500 tokens took 450 MiB, of which
    nothing was given back while the grammar was kept."""
    monkeypatch.setattr(grammar_constraint, "FIRST_S", 0.1)
    monkeypatch.setattr(grammar_constraint, "EACH_TOKEN_S", 0.0005)  # so that it is costly on any processor
    words = [f"W{n}: /[ab]*a[ab]{{{25 + n}}}c{n}/" for n in range(60)]
    source = "\n".join([f"start: {' | '.join(f'W{n}' for n in range(60))}", *words])
    constraint, generator = begun(OutputConstraint("grammar", source), compiler()), np.random.default_rng(1)

    def follow() -> None:
        allowed = [token for token in allowed_ids(constraint) if set(text_of(TEXT, token)) <= {"a", "b"}]
        constraint.accept(int(generator.choice(allowed)))

    with pytest.raises(ConstraintFailed, match=r"0\.5 ms a token"):
        collections.deque((follow() for _ in range(300)), maxlen=0)


def test_a_grammar_that_answers_have_used_up_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of one client together must not use up a grammar for others, nor fill the memory of a kept one."""
    monkeypatch.setattr(grammar_constraint, "FIRST_S", 0.0)
    by, wanted = compiler(), schema(PERSON)
    begun(wanted, by)
    used_up = by._compiled[wanted]
    feed(begun(wanted, by), '{"name": "a", "age": 3}')
    assert by._compiled[wanted] is not used_up


@settings(max_examples=120, deadline=None)
@given(schemas(), st.integers(0, 2**32))
def test_whatever_is_allowed_fits_the_schema(wanted: dict[str, object], seed: int) -> None:
    """A random walk without a model. After 20 tokens it ends at the first chance, because numbers alone could go on
    forever."""
    constraint, generator, out = begun(schema(wanted)), np.random.default_rng(seed), []
    while not constraint.complete and not (constraint.may_end and len(out) > 20):
        out.append(int(generator.choice(allowed_ids(constraint))))
        constraint.accept(out[-1])
        if len(out) > 1500:
            return
    tokenizer = TEXT.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    jsonschema.validate(json.loads(tokenizer.decode(out)), wanted)


def meeting(patterns: int) -> dict[str, object]:
    return {"allOf": [{"type": "string", "pattern": f"[a-z]{{{n}}}.*{n}"} for n in range(1, patterns + 1)]}


def in_a_row(patterns: int) -> dict[str, object]:
    """Schemas that each refer to the next and have a pattern as well."""
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "pattern": f".*{n}"} for n in range(patterns)}
    return {"$defs": chain | {f"d{patterns}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def in_properties(patterns: int) -> dict[str, object]:
    """Objects that all name the same property."""
    parts = [{"type": "object", "properties": {"a": {"pattern": f".*{n}"}}} for n in range(patterns)]
    return {"allOf": parts}


def in_circles(patterns: int) -> dict[str, object]:
    """Schemas that each lead back to themselves through a schema that they have in common."""
    ways = {
        f"way{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n}"}}} for n in range(patterns)
    }
    circles = {
        f"d{n}": {"pattern": f".*{n}", "properties": {f"to{n}": {"$ref": f"#/$defs/way{n}"}}}
        for n in range(patterns)
    }
    together = {"allOf": [{"$ref": f"#/$defs/{way}"} for way in ways]}
    alone = {name: {"$ref": f"#/$defs/{name}"} for name in circles}
    return {"$defs": ways | circles, "type": "object", "properties": {**alone, "together": together}}


FAR = {"$id": "http://a.b/c", "allOf": [{"$ref": "#/$defs/far"}], "$defs": {"far": {"multipleOf": 999_983}}}


@pytest.mark.parametrize(
    "wanted",
    [
        meeting(29),
        *(
            pytest.param(wanted, marks=pytest.mark.slow)
            for wanted in (
                {"type": "object", "properties": {"a": FAR}},
                in_a_row(29),
                in_a_row(2_000),
                in_properties(29),
                in_circles(21),
                {"multipleOf": 1_000_000_000, "minimum": -60_289_246_354_029},
                {"prefixItems": [{"type": "integer", "multipleOf": 99_991 - n} for n in range(20)]},
            )
        ),
    ],
)
def test_what_takes_too_much_is_refused(wanted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these took the compiler minutes, all memory or the process, and every other constrained turn waited."""
    monkeypatch.setattr(grammar_trial, "CPU_S", 1)
    by = compiler()
    assert TOO_MUCH in refused(schema(wanted), by).message
    assert allowed_ids(begun(schema({"const": json.dumps(wanted)[:20]}), by)), "the next one is not held up"


@pytest.mark.parametrize("exponent", ["999", "99999999999999999999"])
def test_a_number_that_is_no_float_is_refused(exponent: str) -> None:
    refused(schema(f'{{"multipleOf": 1e{exponent}}}'))


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": f"^{n}"} for n in range(40)}},
        {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"pattern": "^b"}}}],
         "$defs": {"base": {"type": "object", "properties": {f"p{n}": {"pattern": "^c"} for n in range(20)}}}},
        {"anyOf": [{"type": "string", "pattern": f"^{n}$"} for n in range(40)]},
        {"$defs": {"node": {"type": "object", "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$"}, "next": {"$ref": "#/$defs/node"}}}},
         "$ref": "#/$defs/node"},
        {"type": "integer", "multipleOf": 100_000},
        {"type": "number", "multipleOf": 0.00001, "minimum": 0},
        {"type": "integer", "multipleOf": 86_400},
    ],
)  # fmt: skip
def test_patterns_that_do_not_meet_and_usual_divisors_are_taken(wanted: object) -> None:
    assert allowed_ids(begun(schema(wanted)))


@pytest.mark.parametrize(
    "wanted",
    [schema({"enum": ["<|im_end|>"]}), regex("<\\|im_end\\|>x"), schema({"const": {"<|bos|>": "</s>"}})],
)
def test_a_control_tokens_name_is_text_like_any_other(wanted: OutputConstraint) -> None:
    """Such a text used to be taken for the control token, which is never allowed, so the turn failed."""
    constraint, out = begun(wanted), []
    while not constraint.complete:
        out.append(max(allowed_ids(constraint), key=lambda token_id: len(text_of(TEXT, token_id))))
        constraint.accept(out[-1])
    assert not {0, 1, 2} & set(out)


def test_a_token_of_a_long_text_costs_what_one_of_a_short_text_does() -> None:
    """All of the remaining text used to be tokenized again at each token. This took 10 ms of the engine's thread, which
    every other turn waited for."""
    costs = []
    for length in (60, 60_000):
        constraint, spent = begun(schema({"const": "x" * length})), []
        for _ in range(20):
            started_s = time.thread_time()
            chosen = allowed_ids(constraint)[-1]
            constraint.accept(chosen)
            spent.append(time.thread_time() - started_s)
        costs.append(statistics.median(spent))
    assert costs[1] < 5 * costs[0]


def test_a_huge_expression_is_followed() -> None:
    """Its first token used to take 0.4 s, in which no other turn went on. Then it failed."""
    constraint = begun(regex("日{100000}"))
    for _ in range(9):
        constraint.accept(allowed_ids(constraint)[0])


def test_five_thousand_choices_are_not_too_many() -> None:
    feed(begun(schema({"enum": [f"v{n}v{n}v{n}" for n in range(5_000)]})), '"v4177v4177v4177"')


async def test_what_is_known_does_not_wait_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """All new schemas used to be tried and compiled in one line. A hard schema took four to seven seconds."""
    by, go_on = compiler(), threading.Event()
    await by.compile(schema(PERSON))
    refusal = GrammarTrial.refusal

    def slow(self: GrammarTrial, constraint: OutputConstraint) -> str | None:
        go_on.wait(10.0)
        return refusal(self, constraint)

    monkeypatch.setattr(GrammarTrial, "refusal", slow)
    new = [asyncio.create_task(by.compile(regex(f"a{{{number}}}"), "a")) for number in range(1, 4)]
    await asyncio.sleep(0)
    assert await by.compile(schema(PERSON), "a")
    assert not any(task.done() for task in new)
    go_on.set()
    assert all(await asyncio.gather(*new))
