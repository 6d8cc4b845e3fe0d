"""Turns JSON schemas, regular expressions, function calls and grammars into constraints for the engine.

llguidance reads the grammar and keeps the masks. This module sets its bounds and puts its errors in words for a client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from serving.grammars.annotations import without_annotations
from serving.grammars.grammar_constraint import CompiledGrammar, GrammarConstraint, reason_of
from serving.grammars.strict_calls import StrictCalls, StrictCallsConstraint
from serving.text.detokenizer import TokenBytes
from serving.text.tool_calls.call_watch import watched_opening
from serving.text.tool_calls.formats import NamedFormat, tool_format
from serving.text.tool_calls.grammar import calls_grammar
from serving.text.tool_calls.grammar_terms import JSON_OPTIONS, NOTHING_FORCED
from serving.text.tool_calls.openings import opening_of
from serving.text.tool_calls.strict_grammar import strict_calls_grammar
from serving.wire.turns import OutputConstraint

if TYPE_CHECKING:
    from serving.text.tool_calls.formats import FormatName

LIMITS = LLParserLimits(
    max_lexer_states=30_000, max_grammar_size=200_000, initial_lexer_fuel=200_000, verbose_errors=False
)
"""A lexer state takes one to ten kilobytes. Fuel may be spent at the first token, on the engine's thread: 0.05 s at
most."""
EXACT_INTEGERS = 2**53
ANY_ARGUMENTS = {"type": "object"}
_OPTIONS_LINE = re.compile(r"^\s*%llguidance\b.*$", re.MULTILINE)


class Grammars:
    """Compiles grammars, however long that takes, and keeps nothing but the vocabulary. Used on one thread.

    `tokenizer` is None if the model has none; `vocab_size` is the model's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._num_mask_bytes = -(-vocab_size // 8)

    def compile(self, constraint: OutputConstraint) -> CompiledGrammar | StrictCalls:
        """Raises ValueError that says what is wrong."""
        match constraint.kind:
            case "regex":
                grammar = _unforced(LLMatcher.grammar_from_regex(constraint.source))
            case "json_schema":
                check_integers(constraint.source)
                source = _only_restrictions(constraint.source)
                grammar = _unforced(LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS))
            case "tool_calls":
                check_integers(constraint.source)
                wanted = _restricting_calls(json.loads(constraint.source))
                wanted["answer"] = without_annotations(wanted["answer"])
                grammar = LLMatcher.grammar_from_lark(calls_grammar(wanted, self._special_ids()))
            case "grammar":
                grammar = LLMatcher.grammar_from_lark(lark_of(constraint.source))
            case "strict_calls":
                return self._strict_calls(_restricting_calls(json.loads(constraint.source)))
        return self._compiled(grammar)

    def begin(self, grammar: CompiledGrammar | StrictCalls) -> GrammarConstraint | StrictCallsConstraint:
        """A new constraint, before its first token. Raises ConstraintFailed."""
        compiled = grammar.call if isinstance(grammar, StrictCalls) else grammar
        copy = GrammarConstraint(compiled.matcher.deep_copy(), compiled)
        copy.allowed()
        return StrictCallsConstraint(grammar) if isinstance(grammar, StrictCalls) else copy

    def _compiled(self, grammar: str) -> CompiledGrammar:
        vocabulary, end_id = self._vocabulary
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return CompiledGrammar(matcher, end_id, self._num_mask_bytes)

    def _strict_calls(self, wanted: Mapping[str, Any]) -> StrictCalls:
        """`wanted` comes from serving/front/api/answers/tools.py. If a schema cannot be enforced, and need not be, its
        function's arguments are free."""
        name: FormatName = wanted["format"]
        functions = {each["name"]: each["parameters"] for each in wanted["functions"]}
        try:
            call = self._call(name, functions)
        except ValueError:
            for function in wanted["functions"]:
                self._free_unless_enforced(name, function, functions)
            call = self._call(name, functions)
        form = tool_format(name)
        opening = watched_opening(
            opening_of(name),
            list(functions),
            wanted["reasoning"],
            self._special_ids(),
            8 * self._num_mask_bytes,
            self._token_bytes.__getitem__,
        )
        one_call = isinstance(form, NamedFormat) and form.one_call
        return StrictCalls(opening, call, one_call)

    def _free_unless_enforced(
        self, name: FormatName, function: Mapping[str, Any], functions: dict[str, Mapping[str, Any]]
    ) -> None:
        try:
            self._call(name, {function["name"]: function["parameters"]})
        except ValueError as error:
            if function["must"]:
                raise ValueError(f"{function['name']}: {reason_of(str(error))}") from error
            functions[function["name"]] = ANY_ARGUMENTS

    def _call(self, name: FormatName, functions: Mapping[str, Mapping[str, Any]]) -> CompiledGrammar:
        check_integers(json.dumps(functions))
        grammar = strict_calls_grammar(name, functions, self._special_ids())
        return self._compiled(LLMatcher.grammar_from_lark(grammar))

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        assert self._tokenizer is not None
        return TokenBytes(self._tokenizer)

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, int]:
        """The vocabulary, and the token that llguidance takes for the end of output: a special token. No mask contains
        it, since the engine allows the model's own end tokens."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer")
        end_id = min(self._special_ids().values(), default=0)
        return LLTokenizer(self._tokenizer.to_str(), eos_token=end_id), end_id

    def _special_ids(self) -> dict[str, int]:
        assert self._tokenizer is not None
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}


def _unforced(grammar: str) -> str:
    """llguidance's version of a regular expression or a schema, as a grammar with the option NOTHING_FORCED."""
    (made,) = json.loads(grammar)["grammars"]
    rule = made["lark_grammar"] or f"start: %json {json.dumps(made['json_schema'], ensure_ascii=False)}"
    return f"{NOTHING_FORCED}\n{rule}"


def _only_restrictions(source: str) -> str:
    """The schema without annotations that llguidance refuses. What is no JSON stays as it is: the compiler says what is
    wrong."""
    try:
        schema = json.loads(source)
    except json.JSONDecodeError:
        return source
    kept = without_annotations(schema)
    return source if kept == schema else json.dumps(kept, ensure_ascii=False)


def _restricting_calls(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the functions of calls. `wanted` comes from serving/front/api/answers/tools.py."""
    functions = [
        {**function, "parameters": without_annotations(function["parameters"])}
        for function in wanted["functions"]
    ]
    return {**wanted, "functions": functions}


def lark_of(source: str) -> str:
    """A grammar in EBNF (`root ::= ...`, as in llama.cpp and XGrammar), or already in Lark's notation, as Lark. Raises
    ValueError."""
    try:
        lark = any_to_lark(source)
    except Exception as error:  # it raises Exception itself
        raise ValueError(str(error) or type(error).__name__) from error
    return f"{NOTHING_FORCED}\n{_OPTIONS_LINE.sub('', lark)}"


def check_integers(source: str) -> None:
    """llguidance reads integers as floats, and would hold the output to another number. Raises ValueError for integers
    that are too large."""
    try:
        json.loads(source, parse_int=_exact)
    except json.JSONDecodeError:
        return  # the compiler says what is wrong
    except RecursionError:
        raise ValueError("the schema's recursion is too deep") from None


def _exact(digits: str) -> int:
    value = int(digits)
    if abs(value) > EXACT_INTEGERS:
        raise ValueError(f"{digits[:40]} is beyond 2**53")
    return value
