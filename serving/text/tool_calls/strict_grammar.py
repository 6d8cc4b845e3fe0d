"""The grammar, in llguidance's language, of a call in a free answer: from the token in which its opening begins to its
end, or to the end of the calls if the format has a frame around them.

It is no narrower than the opening (openings.py), so any token that may complete an opening fits it. A model may put
blanks where JSON allows them; otherwise it must follow the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.text.tool_calls.formats import (
    FormatName,
    JsonCallFormat,
    NamedFormat,
    PythonicFormat,
    TaggedFormat,
    tool_format,
)
from serving.text.tool_calls.grammar_terms import CALL_ID, NOTHING_FORCED, GrammarTerms
from serving.text.tool_calls.openings import (
    CHANNEL,
    MOST_BLANKS,
    START,
    TO_FUNCTIONS,
    named_mark,
)
from serving.text.tool_calls.pythonic_grammar import pythonic_call
from serving.text.tool_calls.tagged_grammar import tagged_call

_COMMON = rf"""
ANY: /(?s:.*)/
BLANKS: /[ \t\r\n]{{1,{MOST_BLANKS}}}/
WS: / |\n {{0,32}}/"""


def strict_calls_grammar(
    name: FormatName,
    functions: Mapping[str, Mapping[str, Any]],
    special_ids: Mapping[str, int],
) -> str:
    """`functions` are the schemas of their parameters, by function name. Special tokens of the format are tokens in the
    grammar."""
    return _Writer(name, GrammarTerms(special_ids)).grammar(functions)


class _Writer:
    def __init__(self, name: FormatName, terms: GrammarTerms) -> None:
        self._name = name
        self._terms = terms
        self._rules: list[str] = []

    def grammar(self, functions: Mapping[str, Mapping[str, Any]]) -> str:
        start = self._start()
        calls = []
        for index, (function, parameters) in enumerate(functions.items()):
            rule = f"call_{index}"
            self._rules.append(f"{rule}: {self._call(rule, function, parameters)}")
            calls.append(rule)
        if self._name == "gpt_oss":
            self._rules.append(f"call_to_first: {' | '.join(f'{rule}_to_first' for rule in calls)}")
        lines = [NOTHING_FORCED, f"start: {start}", f"call: {' | '.join(calls)}", *self._rules]
        return "\n".join(lines) + _COMMON

    def _until(self, mark: str) -> str:
        """Everything up to a mark that begins the call. The mark is a token, or text whose first token may begin before
        the mark."""
        rule, parts = f"until_{len(self._rules)}", self._terms.at_token(mark)
        if parts is not None:
            before, rest = parts
            if not before:
                return self._terms.literal(mark)
            self._rules.append(f"{rule.upper()}: ANY {json.dumps(before)}")
            return f"{rule.upper()} {self._terms.literal(rest)}"
        self._rules.append(f"{rule}[suffix={json.dumps(mark)}]: ANY")
        return rule

    def _start(self) -> str:
        """The answer from the opening on."""
        literal = self._terms.literal
        if self._name == "gpt_oss":
            self._rules.append(r"WORD: /\w{1,32}/")
            to, channel, start = literal(TO_FUNCTIONS), literal(CHANNEL), literal(START)
            to_first = f'({start} BLANKS? "assistant"?)? BLANKS? {to} call_to_first'
            return f"{channel} BLANKS? WORD BLANKS? {to} call | {to_first}"
        match tool_format(self._name):
            case NamedFormat() as form:
                mark = named_mark(form)
                rest = form.call_opener.removeprefix(mark)
                return f"{self._until(mark)} {literal(rest) if rest else ''} call"
            case TaggedFormat() as form:
                return f"{self._until(form.name_opener or form.call_opener)} BLANKS? call"
            case PythonicFormat() as form:
                calls = 'BLANKS? call ("," BLANKS? call)* "]"'
                marked = f'{self._until(form.opener)} BLANKS? "[" {calls} WS? {literal(form.closer)}'
                return f"{marked} | {self._until('[')} {calls}"
            case form:
                return self._start_of_json(form)

    def _start_of_json(self, form: JsonCallFormat) -> str:
        mark, closer = self._until(form.opener), self._terms.literal(form.closer) if form.closer else ""
        if form.bare:
            return f'({mark} BLANKS? "{{" | {self._until("{")}) call'
        if "[" not in form.filler:
            return f'{mark} BLANKS? "{{" call WS? {closer}'
        more = '(WS? "," WS? "{" call)*'
        return f'{mark} BLANKS? ("[" BLANKS? "{{" call {more} WS? {closer} | "{{" call)'

    def _call(self, rule: str, function: str, parameters: Mapping[str, Any]) -> str:
        literal, schema = self._terms.literal, self._terms.schema
        if self._name == "gpt_oss":
            constrain, message = literal("<|constrain|>"), literal("<|message|>")
            kind = f'(BLANKS? {constrain} BLANKS? "json" | BLANKS "json")? BLANKS?'
            behind_name = f"{kind} {message} BLANKS? {schema(parameters)}"
            channel = f"BLANKS? {literal(CHANNEL)} BLANKS? WORD"
            self._rules.append(f"{rule}_to_first: {literal(function)} {channel} {behind_name}")
            return f"{literal(function)} {behind_name}"
        match tool_format(self._name):
            case NamedFormat() as form:
                tail = literal(form.tail) if form.tail else ""
                call_id = f"{literal(form.id_opener)} {CALL_ID}" if form.id_opener else ""
                return f"{literal(function)} {call_id} {literal(form.separator)} {schema(parameters)} {tail}"
            case TaggedFormat() as form:
                arguments, *further = tagged_call(form, self._terms, rule, parameters)
                self._rules += further
                head = literal(f"{function}{form.name_closer}{form.line_end}")
                return f"{head} {arguments} {literal(form.function_closer or form.call_closer)}"
            case PythonicFormat() as form:
                arguments, *further = pythonic_call(self._terms, rule, parameters)
                self._rules += further
                return f"{literal(form.head(function))} {arguments} {literal(form.tail)}"
            case form:
                colon, comma = 'WS? ":" WS?', 'WS? "," WS?'
                name, key = (_quoted(json.dumps(text)) for text in (function, form.arguments))
                head = f"WS? {_quoted(json.dumps('name'))} {colon} {name} {comma} {key} {colon}"
                return f'{head} {schema(parameters)} WS? "}}"'


def _quoted(text: str) -> str:
    """A text as these grammars write it."""
    return json.dumps(text)
