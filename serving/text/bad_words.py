"""Words that an answer may not contain, as the token sequences that write them. Method: vLLM's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from engine.api import InvalidRequest


def word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as written at the beginning of a text. Also as written after a blank, if that takes as many tokens and
    the first one differs. Other ways to write it (in capitals, after a quotation mark) are other words.

    Raises InvalidRequest, naming `bad_words`.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = word.lstrip()
        alone = tuple(tokenizer.encode(bare, add_special_tokens=False).ids)
        if not alone:
            raise InvalidRequest(f"bad_words: entry {index} has no tokens.", "bad_words")
        found.append(alone)
        behind_blank = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False).ids)
        if len(behind_blank) == len(alone) and behind_blank[0] != alone[0]:
            found.append(behind_blank)
    return tuple(found)
