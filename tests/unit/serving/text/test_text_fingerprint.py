"""Fingerprints are equal where a history means the same, on every machine and however files are written."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from controllers.records import ModelFingerprint
from serving.text.text import TextProcessor
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer, piece_tokenizer


def of(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int = 1000) -> ModelFingerprint:
    return TextProcessor(tokenizer, vocab_size=vocab_size, max_context_len=512).fingerprint("weights")


def test_a_tokenizer_that_was_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert of(AutoTokenizer.from_pretrained(tmp_path)) == of(tokenizer)


def test_another_token_is_another_tokenizer_whatever_the_template() -> None:
    plain, grown = byte_level_tokenizer(), byte_level_tokenizer()
    grown.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert of(grown).tokenizer != of(plain).tokenizer
    assert of(grown).template == of(plain).template
    assert len({of(each).tokenizer for each in (plain, grown, piece_tokenizer(), None)}) == 4


def test_another_template_is_the_same_tokenizer() -> None:
    one, other = of(byte_level_tokenizer(CHATML)), of(byte_level_tokenizer(CHATML + " "))
    assert one.tokenizer == other.tokenizer
    assert one.template != other.template
    assert of(byte_level_tokenizer(None)).template is None


def test_rows_of_the_embedding_that_no_token_has_change_nothing() -> None:
    assert of(byte_level_tokenizer(), 1000) == of(byte_level_tokenizer(), 1024)


def test_without_a_tokenizer_ids_are_told_apart_by_their_number() -> None:
    assert of(None, 1000) == of(None, 1000)
    assert of(None, 1000).tokenizer != of(None, 1024).tokenizer
