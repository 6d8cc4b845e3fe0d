"""A deterministic stand-in for a model: its "KV" is the token ids themselves. No torch.

The next token is a hash of the sequence as read back through the page table. A page lost, shared by mistake
or overwritten therefore changes tokens, which is how tests of the books above notice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams, TokenLogprob
from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch

EOS_TOKEN_ID = 0
UNWRITTEN = -1
BYTES_PER_TOKEN = 4
FAKE_LOGPROB = -1.0


class NullRunner:
    """Runner whose tokens any test can predict with `null_generate`.

    `eos_probability` is the share of contexts that are followed by EOS_TOKEN_ID, which is never produced
    otherwise. With `poison`, reading a slot that was never written (or was forgotten) is an AssertionError.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        max_context_len: int,
        *,
        eos_probability: float = 0.0,
        poison: bool = True,
    ) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._eos_probability = eos_probability
        self._poison = poison
        self._kv = np.full((num_pages, page_size), UNWRITTEN, dtype=np.int32)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def page_size_bytes(self) -> int:
        return self._page_size * BYTES_PER_TOKEN

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context_len(self) -> int:
        return self._max_context_len

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Writes every item's tokens before any item reads, as a real step does layer by layer."""
        for item in batch.items:
            self._write(item)
        return ModelOutput([self._run(item) for item in batch.items])

    def forget(self, pages: Iterable[int]) -> None:
        """Marks pages unwritten, so that a poisoned read finds whoever still uses them."""
        self._kv[list(pages)] = UNWRITTEN

    def _write(self, item: BatchItem) -> None:
        assert item.token_ids, f"{item.request_id}: an item without tokens"
        tokens = np.asarray(item.token_ids, dtype=np.int32)
        end = item.start + len(tokens)
        assert end <= self._max_context_len, f"{item.request_id}: {end} tokens exceed the context"
        assert tokens.min() >= 0, f"{item.request_id}: negative token id"
        assert tokens.max() < self._vocab_size, f"{item.request_id}: token id past the vocabulary"
        pages = self._pages_of(item, end)
        positions = np.arange(item.start, end)
        self._kv[pages[positions // self._page_size], positions % self._page_size] = tokens

    def _pages_of(self, item: BatchItem, num_tokens: int) -> NDArray[np.int32]:
        count = -(-num_tokens // self._page_size)
        pages = item.pages[:count]
        assert len(pages) == count, f"{item.request_id}: {len(pages)} pages for {num_tokens} tokens"
        assert pages.min() >= 0, f"{item.request_id}: negative page"
        assert pages.max() < self._num_pages, f"{item.request_id}: page outside the pool"
        if item.contiguous:
            assert (np.diff(pages) == 1).all(), f"{item.request_id}: pages are not one ascending run"
        return pages

    def _run(self, item: BatchItem) -> ItemOutput:
        end = item.start + len(item.token_ids)
        pages = self._pages_of(item, end)
        sequence = self._kv[pages].reshape(-1)[:end]
        if self._poison and sequence.min() == UNWRITTEN:
            position = int(np.argmax(sequence == UNWRITTEN))
            page = int(pages[position // self._page_size])
            raise AssertionError(f"{item.request_id}: position {position} reads page {page}, never written")
        input_logprobs = _input_logprobs(item)
        if item.sample is None:
            return ItemOutput((), input_logprobs=input_logprobs)
        assert item.sample.position == end, f"{item.request_id}: samples position {item.sample.position}"
        token = _next_token(sequence, self._vocab_size, self._eos_probability, _salt(item.sample.params))
        logprobs: tuple[TokenLogprob, ...] = ()
        if item.sample.logprobs:
            logprobs = (_fake_logprob(token, item.sample.top_logprobs),)
        return ItemOutput((token,), logprobs, input_logprobs)


def null_generate(
    tokens: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    eos_probability: float = 0.0,
    params: SamplingParams | None = None,
) -> list[int]:
    """The oracle: the `count` tokens that NullRunner produces after `tokens`, ended early by EOS_TOKEN_ID
    (which is included). Greedy unless `params` samples; a sampled seed of 0 equals greedy."""
    sequence = np.empty(len(tokens) + count, dtype=np.int32)
    sequence[: len(tokens)] = tokens
    salt = 0 if params is None else _salt(params)
    produced: list[int] = []
    for length in range(len(tokens), len(sequence)):
        token = _next_token(sequence[:length], vocab_size, eos_probability, salt)
        sequence[length] = token
        produced.append(token)
        if token == EOS_TOKEN_ID:
            break
    return produced


def _salt(params: SamplingParams) -> int:
    return 0 if params.greedy else params.seed & 0xFFFFFFFF


def _next_token(sequence: NDArray[np.int32], vocab_size: int, eos_probability: float, salt: int) -> int:
    digest = zlib.crc32(sequence.tobytes(), salt)
    if zlib.crc32(digest.to_bytes(4, "little")) < eos_probability * 2**32:
        return EOS_TOKEN_ID
    return 1 + digest % (vocab_size - 1)


def _fake_logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, FAKE_LOGPROB, tuple((token, FAKE_LOGPROB) for _ in range(top)))


def _input_logprobs(item: BatchItem) -> tuple[TokenLogprob, ...]:
    """Positions start+1 .. start+len (with `next_token`), and position 0, from `input_logprobs_from` on."""
    if item.input_logprobs_from is None:
        return ()
    known = [*item.token_ids] if item.next_token is None else [*item.token_ids, item.next_token]
    first = max(item.input_logprobs_from, item.start + 1)
    scored = [_fake_logprob(token, item.top_input_logprobs) for token in known[first - item.start :]]
    if item.input_logprobs_from <= 0 == item.start:
        scored.insert(0, TokenLogprob(known[0], None))
    return tuple(scored)
