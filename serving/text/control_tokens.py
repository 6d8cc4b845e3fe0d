"""The control tokens of a chat template: keeps what users write from being read as such, and finds those that the
template wrote.

A tokenizer reads `<|im_end|>` in a message as the token that ends a message. So each such place in a message is broken
after its first character with a mark that nobody can guess. The rendered text is cut at the marks, and its pieces are
tokenized one by one. They read the same, but contain no control token that the template did not write.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from serving.wire.turns import ChatPrompt

_MARK_BYTES = 12


@dataclass(frozen=True, slots=True)
class LastPart:
    """A part of a text, from the character `start` on. It begins with the control token `token_id`, which the text
    before it has `count` times."""

    start: int
    token_id: int
    count: int


class ControlTokens:
    """The special tokens of one tokenizer. Tokens of a single character cannot be broken and are left as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        texts = sorted(
            re.escape(token.content) for token in added if token.special and len(token.content) > 1
        )
        self._any = re.compile("|".join(texts)) if texts else None
        self._starts = re.compile(f"(?=(?:{'|'.join(texts)})).", re.DOTALL)

        apart = [token.content for token in added if token.content]
        self._apart = re.compile("|".join(map(re.escape, sorted(apart, key=len, reverse=True))) or r"(?!)")
        self._ids = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and not (token.normalized or token.single_word)
        }

    def last_part(self, text: str, most_chars: int) -> LastPart | None:
        """The longest end of a rendered text that begins with a control token and has at most `most_chars` characters;
        None if there is none. Its tokens do not depend on the text before it."""
        counts: Counter[str] = Counter()
        for found in self._apart.finditer(text):
            token = found[0]
            if len(text) - found.start() <= most_chars and token in self._ids:
                return LastPart(found.start(), self._ids[token], counts[token])
            counts[token] += 1
        return None

    def guard(self, prompt: ChatPrompt) -> tuple[ChatPrompt, str | None]:
        """The prompt with the mark in every control token that a message contains, and the mark; None if there is none.

        Template arguments and tools are guarded as well, since the client writes them.
        """
        mark = f"Kedge{secrets.token_hex(_MARK_BYTES)}"
        found = False

        def broken(text: str) -> str:
            nonlocal found
            if self._any is None or self._any.search(text) is None:
                return text
            found = True
            return self._starts.sub(rf"\g<0>{mark}", text)

        messages, tools = (
            tuple(_with_strings(each, broken) for each in some) for some in (prompt.messages, prompt.tools)
        )
        template_kwargs = _with_strings(prompt.template_kwargs, broken)
        guarded = replace(prompt, messages=messages, tools=tools, template_kwargs=template_kwargs)
        return (guarded, mark) if found else (prompt, None)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with every string in it changed, keys included: templates write out whole schemas."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _with_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(inner, change) for inner in value]
    return value
