"""Token ids to text, piece by piece. Characters split over several tokens are held back until they are whole."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_HELD_TOKENS = 8
"""More tokens than a UTF-8 character can be split over. A character that is still broken then stays broken."""


class Detokenizer(Protocol):
    """Follows one request's output."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new whole characters."""

    def flush(self) -> str:
        """The output has ended: broken characters are shown as U+FFFD."""


class NoText:
    """For a model without a tokenizer."""

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class TokenBytes:
    """What each token of a vocabulary contributes to the text, in bytes. Built once per model.

    `exact` says that a text is simply its tokens' bytes joined (byte-level BPE: Llama 3, Qwen, GPT). Other vocabularies
    have rules for neighbouring tokens, such as a space that is dropped at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(json.loads(tokenizer.to_str())["decoder"])
        self.exact = kinds == {"ByteLevel"}
        self._bytes = self._table()
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.longest = max(map(len, self._bytes), default=1)

    def _table(self) -> list[bytes]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes seconds

        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        for token, token_id in vocab.items():
            table[token_id] = _level_bytes(token, byte_of) if self.exact else _piece_bytes(token)
        return table

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for ids that the model has and the tokenizer does not."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def detokenizer(
        self, *, skip_special_tokens: bool, shown: Sequence[str] = (), before: Sequence[int] = ()
    ) -> Detokenizer:
        """`shown` are special tokens that are never skipped. `before` are the tokens whose text the output goes on."""
        skipped = self._special if skip_special_tokens else frozenset()
        skipped -= {self._tokenizer.token_to_id(token) for token in shown}
        if self.exact:
            return ByteDetokenizer(self, skipped)
        return WindowDetokenizer(self._tokenizer, skipped, before)


class ByteDetokenizer:
    """For vocabularies whose text is their tokens' bytes joined. Takes linear time even if nothing is valid UTF-8."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        return self._decoder.decode(b"".join(table[i] for i in token_ids if i not in skipped))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes a short window and returns what the newest tokens added to it.

    `tokenizers.decoders.DecodeStream` does the same, but it cannot be flushed and holds broken characters without
    limit.

    A text's first blank is dropped in such vocabularies, so an output that goes on with a text begins with the end of
    that (`before`) in its window. If the end is a broken character, the output is a text of its own.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        context = [token_id for token_id in before if token_id not in skipped]
        text = self._decode(context)
        is_whole = not text.endswith("\ufffd")
        self._window = context if is_whole else []
        self._context_len = len(self._window)
        self._context_text = text if is_whole else ""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._context_len
        if len(text) <= len(self._context_text) or (text.endswith("\ufffd") and held < _MAX_HELD_TOKENS):
            return ""
        added = text[len(self._context_text) :]
        # The tokens just shown become the context of the next ones.
        del self._window[: self._context_len]
        self._context_len = len(self._window)
        self._context_text = self._decode(self._window)
        return added

    def flush(self) -> str:
        text = self._decode(self._window)
        added = text[len(self._context_text) :]
        self._window, self._context_len, self._context_text = [], 0, ""
        return added

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*map(_decoder_kinds, decoder["decoders"]))
    return {decoder["type"]}


def _level_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """Byte-level BPE writes each byte as one printable character; added tokens may be written as they are."""
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        return token.encode()


def _piece_bytes(token: str) -> bytes:
    """SentencePiece writes a space as U+2581 and bytes outside its vocabulary as <0xNN>."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()
