"""What grammars of calls are made of, in llguidance's language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NOTHING_FORCED = '%llguidance {"no_forcing": true}'
"""First line of a grammar. Else all that has to follow would be tokenized again at each of its tokens, and the names of
control tokens in it be taken for these."""


CALL_ID = "/[a-zA-Z0-9]{9}/"
"""The id of a call, where the model writes one."""


class GrammarTerms:
    """Writes texts and schemas. `special_ids` are the model's special tokens, by their texts."""

    def __init__(self, special_ids: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._special_ids = special_ids
        self._json_options = json_options

    def literal(self, text: str) -> str:
        texts = [re.escape(token) for token in self._special_ids]
        parts = re.split(f"({'|'.join(texts)})", text) if texts else [text]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part)
            for part in parts
            if part
        )

    def schema(self, value: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**value, 'x-guidance': self._json_options}, ensure_ascii=False)}"

    def at_token(self, text: str) -> tuple[str, str] | None:
        """The text before its first special token, which no other text writes, and the rest; None if it has none."""
        places = [place for token in self._special_ids if (place := text.find(token)) >= 0]
        return (text[: min(places)], text[min(places) :]) if places else None
