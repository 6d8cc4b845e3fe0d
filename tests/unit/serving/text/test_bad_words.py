"""Words become the token sequences that write them, at the beginning of a text and after a blank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.api import InvalidRequest
from serving.text.bad_words import word_tokens
from serving.text.text import TextProcessor
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

CHAT = Path(__file__).parents[4] / "assets" / "models" / "kedge-chat"
TEXT = TextProcessor.load(str(CHAT), vocab_size=2048, max_context_len=2048)


def test_a_word_is_written_in_two_ways() -> None:
    backend = AutoTokenizer.from_pretrained(CHAT).backend_tokenizer

    def ids(text: str) -> tuple[int, ...]:
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    assert len(ids("dog")) != len(ids(" dog")) or ids("dog")[0] != ids(" dog")[0]
    for word in ("is", " is", "called", "dog", "Rex."):
        bare = word.lstrip()
        found = TEXT.bad_words([word])
        assert found[0] == ids(bare)
        behind = ids(f" {bare}")
        assert found[1:] == ((behind,) if len(behind) == len(ids(bare)) else ())


def test_words_keep_their_order_and_none_is_nothing() -> None:
    both = TEXT.bad_words(["is", "Rex"])
    assert both == TEXT.bad_words(["is"]) + TEXT.bad_words(["Rex"])
    assert TEXT.bad_words([]) == ()


def test_the_words_of_a_request_are_made_into_tokens_once_for_all_its_choices() -> None:
    assert TEXT.bad_words(["Rex", "dog"]) is TEXT.bad_words(["Rex", "dog"])


def test_all_words_are_made_into_tokens_in_one_batch() -> None:
    """One by one they held the event loop of a replica for 50 ms, and no other thread ran for as long."""
    batches: list[list[str]] = []

    class Noting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            batches.append(texts)
            return backend.encode_batch_fast(texts, **options)

    backend: Any = TEXT.tokenizer
    noting: Any = Noting()
    assert word_tokens(noting, ["is", " Rex"]) == TEXT.bad_words(["is", " Rex"])
    assert batches == [["is", "Rex", " is", " Rex"]]


def test_what_has_no_tokens_is_refused() -> None:
    without = TextProcessor(None, vocab_size=9, max_context_len=9)
    small = TextProcessor(byte_level_tokenizer(), vocab_size=1024, max_context_len=9)
    for text, words in ((without, ["a"]), (small, ["a", "  "])):
        with pytest.raises(InvalidRequest) as refused:
            text.bad_words(words)
        assert refused.value.param == "bad_words"
