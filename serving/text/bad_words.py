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
    bare = [word.lstrip() for word in words]
    # Unlike encode, the batch call uses all cores: an event loop waits for it.
    encodings = tokenizer.encode_batch_fast([*bare, *(f" {word}" for word in bare)], add_special_tokens=False)
    ids = [tuple(encoding.ids) for encoding in encodings]
    found: list[tuple[int, ...]] = []
    for index, (alone, behind_blank) in enumerate(zip(ids[: len(bare)], ids[len(bare) :], strict=True)):
        if not alone:
            raise InvalidRequest(f"bad_words: entry {index} has no tokens.", "bad_words")
        found.append(alone)
        if len(behind_blank) == len(alone) and behind_blank[0] != alone[0]:
            found.append(behind_blank)
    return tuple(found)
