"""What a request's sampling parameters forbid, given the output so far: an early end, tokens, and words of several
tokens.

Meanings as in vLLM: `min_tokens`, `allowed_token_ids`, `bad_words`. The first is `min_new_tokens` in transformers. The
last is `bad_words_ids` there, except that words that begin in the prompt do not count here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from engine.api import SamplingParams


class TokenRules:
    """The rules of one request. They depend on the output alone, so an answer that another engine continues stays the
    same. A mask has a bit for each token of the vocabulary, the least significant first: whether it may be next."""

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
        """`eos_token_ids` are those of the vocabulary."""
        self._min_len = params.min_new_tokens
        self._ends = params.stop_token_ids.union(eos_token_ids)
        self._words: dict[tuple[int, ...], list[int]] = {}
        """The last token of each word, by the tokens before it."""
        for word in params.bad_words:
            self._words.setdefault(word[:-1], []).append(word[-1])
        self._head_lens = sorted({len(head) for head in self._words} - {0})
        in_general = _with_bits(vocab_size, params.allowed_token_ids)
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
        """Whether anything is forbidden after `num_output` tokens of output, or may be later."""
        return self._lasts or num_output < self._min_len

    @property
    def recent(self) -> int:
        """How many of the latest output tokens `mask` needs."""
        return max(self._head_lens, default=0)

    def mask(self, num_output: int, latest: Sequence[int]) -> bytearray:
        """The mask after `num_output` tokens, the last of which are `latest`."""
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


def permit(mask: bytearray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)


def both(mask: bytearray, other: bytes | bytearray) -> bytearray:
    """Tokens that both masks, of one length, allow."""
    return bytearray(np.frombuffer(mask, np.uint8) & np.frombuffer(other, np.uint8))


def _with_bits(vocab_size: int, token_ids: Collection[int] | None) -> bytearray:
    """A mask that allows these tokens. None: all of them."""
    num_bytes = -(-vocab_size // 8)
    if token_ids is None:
        return bytearray(((1 << vocab_size) - 1).to_bytes(num_bytes, "little"))
    mask = bytearray(num_bytes)
    permit(mask, token_ids)
    return mask
