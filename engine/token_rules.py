"""What a request's sampling parameters forbid by the output so far: an early end, tokens, and words of several tokens.

Methods as in vLLM: `min_tokens`, `allowed_token_ids`, `bad_words`. The first is transformers' `min_new_tokens`, the
last its `bad_words_ids`, but for words that would begin in the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from engine.api import SamplingParams


class TokenRules:
    """Of one request. A function of the output alone, so that an answer that another engine goes on with stays what it
    is. A mask has a bit for each token of the vocabulary, the least significant first: whether it may be next."""

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._min_len = params.min_new_tokens
        ends = params.stop_token_ids.union(eos_token_ids)
        self._ends = [token_id for token_id in ends if token_id < vocab_size]
        self._words: dict[tuple[int, ...], list[int]] = {}
        """What would end each word, by the tokens before that."""
        for word in params.bad_words:
            self._words.setdefault(word[:-1], []).append(word[-1])
        self._head_lens = sorted({len(head) for head in self._words} - {0})
        in_general = bytearray(_with_bits(vocab_size, params.allowed_token_ids))
        forbid(in_general, self._words.get((), ()))
        self._in_general = bytes(in_general)
        self._lasts = bool(params.bad_words) or params.allowed_token_ids is not None

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> TokenRules | None:
        """None if nothing is forbidden."""
        if not (params.min_new_tokens or params.bad_words or params.allowed_token_ids is not None):
            return None
        return cls(params, eos_token_ids, vocab_size)

    def hold(self, num_output: int) -> bool:
        """Whether anything is forbidden after so many tokens of output, or may be later."""
        return self._lasts or num_output < self._min_len

    @property
    def recent(self) -> int:
        """So many of the latest tokens of the output say what may be next."""
        return max(self._head_lens, default=0)

    def mask(self, num_output: int, latest: Sequence[int]) -> bytearray:
        """After `num_output` tokens, the last of which are `latest`."""
        mask = bytearray(self._in_general)
        if num_output < self._min_len:
            forbid(mask, self._ends)
        for length in self._head_lens:
            if length <= len(latest):
                forbid(mask, self._words.get(tuple(latest[len(latest) - length :]), ()))
        return mask


def forbid(mask: bytearray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id >> 3] &= ~(1 << (token_id & 7))


def both(mask: bytearray, other: bytes | bytearray) -> bytearray:
    """What is allowed by two masks of one length."""
    return bytearray(np.frombuffer(mask, np.uint8) & np.frombuffer(other, np.uint8))


def _with_bits(vocab_size: int, token_ids: Collection[int] | None) -> bytes:
    """None: all of them."""
    num_bytes = -(-vocab_size // 8)
    if token_ids is None:
        return ((1 << vocab_size) - 1).to_bytes(num_bytes, "little")
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)
