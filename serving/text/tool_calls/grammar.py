"""The grammar, in llguidance's language, of an answer that is calls of given functions in a model's own format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.text.tool_calls.formats import tool_format

NOTHING_FORCED = '%llguidance {"no_forcing": true}'
"""First line of a grammar. Else all that has to follow would be tokenized again at each of its tokens, and the names of
control tokens in it be taken for these."""


def calls_grammar(
    wanted: Mapping[str, Any], special_ids: Mapping[str, int], json_options: Mapping[str, Any]
) -> str:
    """`wanted` is what serving/front/api/openai_tools.py writes. Special tokens of the format are the grammar's."""
    form = tool_format(wanted["format"])

    def literal(text: str) -> str:
        texts = [re.escape(token) for token in special_ids]
        parts = re.split(f"({'|'.join(texts)})", text) if texts else [text]
        return " ".join(
            f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts if part
        )

    def schema(value: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**value, 'x-guidance': json_options}, ensure_ascii=False)}"

    rules = []
    for index, function in enumerate(wanted["functions"]):
        head, tail = literal(form.head(function["name"])), literal(form.tail)
        rules.append(f"call_{index}: {head} {schema(function['parameters'])} {tail}")
    call = " | ".join(f"call_{index}" for index in range(len(rules)))
    more = f"({literal(form.between)} call)*" if wanted["parallel"] else ""
    answer = "calls" if wanted["answer"] is None else f"calls | {schema(wanted['answer'])}"
    lines = [
        NOTHING_FORCED,
        f"start: {answer}",
        f"calls: {literal(form.prefix)} call {more} {literal(form.suffix)}",
        f"call: {call}",
        *rules,
    ]
    return "\n".join(lines)
