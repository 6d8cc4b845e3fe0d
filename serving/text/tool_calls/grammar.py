"""The grammar, in llguidance's language, of an answer that consists of calls of given functions in a model's own
format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.text.tool_calls.formats import (
    CallFormat,
    NamedFormat,
    PythonicFormat,
    TaggedFormat,
    tool_format,
)
from serving.text.tool_calls.grammar_terms import CALL_ID, NOTHING_FORCED, GrammarTerms
from serving.text.tool_calls.pythonic_grammar import pythonic_call
from serving.text.tool_calls.tagged_grammar import tagged_call


def calls_grammar(wanted: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """`wanted` comes from serving/front/api/answers/tools.py. The format's special tokens are tokens in the grammar."""
    form = tool_format(wanted["format"])
    terms = GrammarTerms(special_ids)
    rules = []
    for index, function in enumerate(wanted["functions"]):
        name, parameters = f"call_{index}", function["parameters"]
        head, tail = _head(form, terms, function["name"]), terms.literal(form.tail)
        if isinstance(form, TaggedFormat | PythonicFormat):
            if isinstance(form, TaggedFormat):
                arguments, *further = tagged_call(form, terms, name, parameters)
            else:
                arguments, *further = pythonic_call(terms, name, parameters)
            rules += [f"{name}: {head} {arguments} {tail}", *further]
        else:
            rules.append(f"{name}: {head} {terms.schema(parameters)} {tail}")
    call = " | ".join(f"call_{index}" for index in range(len(wanted["functions"])))
    repeats = wanted["parallel"] and not (isinstance(form, NamedFormat) and form.one_call)
    more = f"({terms.literal(form.between)} call)*" if repeats else ""
    answer = "calls" if wanted["answer"] is None else f"calls | {terms.schema(wanted['answer'])}"
    lines = [
        NOTHING_FORCED,
        f"start: {answer}",
        f"calls: {terms.literal(form.prefix)} call {more} {terms.literal(form.suffix)}",
        f"call: {call}",
        *rules,
    ]
    return "\n".join(lines)


def _head(form: CallFormat, terms: GrammarTerms, function: str) -> str:
    """The text of a call before its arguments."""
    if not isinstance(form, NamedFormat) or not form.id_opener:
        return terms.literal(form.head(function))
    opener = terms.literal(f"{form.call_opener}{function}{form.id_opener}")
    return f"{opener} {CALL_ID} {terms.literal(form.separator)}"
