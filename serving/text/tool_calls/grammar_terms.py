"""The parts of grammars of calls, in llguidance's language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

NOTHING_FORCED = '%llguidance {"no_forcing": true}'
"""First line of a grammar. Without it, everything that must follow would be tokenized again at each of its tokens, and
names of control tokens in it would be read as those tokens."""

JSON_OPTIONS: JsonCompileOptions = {
    # A blank, or a line end with the indent after it. If more were allowed, a small model could write blanks for ever.
    "whitespace_pattern": r" |\n {0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""How JSON is written. They come last in a schema, so that it cannot override them."""

DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps what it refers to."""

CALL_ID = "/[a-zA-Z0-9]{9}/"
"""The id of a call, if the model writes one."""


class GrammarTerms:
    """Writes texts and schemas. `special_ids` are the model's special tokens, by their texts."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def literal(self, text: str) -> str:
        texts = [re.escape(token) for token in self._special_ids]
        parts = re.split(f"({'|'.join(texts)})", text) if texts else [text]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part)
            for part in parts
            if part
        )

    def schema(self, value: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**value, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"

    def at_token(self, text: str) -> tuple[str, str] | None:
        """The text before its first special token, and the rest, which begins with that token; None if it has none."""
        places = [place for token in self._special_ids if (place := text.find(token)) >= 0]
        return (text[: min(places)], text[min(places) :]) if places else None
