"""A deterministic stand-in for a model: its "KV" is the token ids themselves. It needs no torch.

The next token is a hash of the sequence as read back through the page table. A page that is lost, shared by mistake or
overwritten therefore changes tokens, so tests of the scheduler and the books notice it. Sliding-window pages, a draft
model and copies to host memory and disk follow the same rule: they must hold the sequence's own tokens. KV that another
adapter has made must not be read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from cache.tiers import PoolPages
from cache.token_chain import KVIdentity
from engine.api import SamplingParams, TokenLogprob
from engine.batch import BatchItem, DraftWork, ItemOutput, ModelOutput, ScheduledBatch
from engine.runner.protocol import Done, RunnerFacts
from engine.runner.stepping import StepByStep

EOS_TOKEN_ID = 0
UNWRITTEN = -1
UNKNOWN = -1
BYTES_PER_TOKEN = 4
FAKE_LOGPROB = -1.0

NULL_IDENTITY = KVIdentity("null", "token ids")

CopyQueue = list[tuple[Future[None], Callable[[], None]]]


class NullRunner:
    """A Runner whose tokens any test can predict with `null_generate`.

    `eos_probability` is the share of contexts that EOS_TOKEN_ID follows. It is never produced otherwise. With `poison`,
    reading a slot that was never written (or was forgotten) is an AssertionError. Without it the runner trusts the
    books: it makes the next token of a greedy decode from the hash that it kept at the token before, at a cost that
    does not grow with the sequence. `draft_accuracy` is the share of the draft model's guesses that are right. Copies
    end at once, or with `copies_wait` when `end_copies` is called. Disk copies have a queue of their own, which
    `end_disk_copies` ends. `adapters` are fingerprints by name.
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
        window_len: int | None = None,
        num_window_pages: int = 0,
        draft_accuracy: float = 0.7,
        copies_wait: bool = False,
        runs_ahead: bool = False,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        adapters = dict(adapters or {})
        page_bytes = page_size * BYTES_PER_TOKEN
        self.facts = RunnerFacts(
            num_pages, page_size, page_bytes, vocab_size, max_context_len,
            window_len, num_window_pages, page_bytes, runs_ahead, NULL_IDENTITY, adapters,
        )  # fmt: skip
        self._steps = StepByStep()
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._eos_probability = eos_probability
        self._poison = poison
        self._window_len = window_len
        self._draft_accuracy = draft_accuracy
        self._copies_wait = copies_wait
        self._kv = np.full((num_pages, page_size), UNWRITTEN, dtype=np.int32)
        self._draft_kv = self._kv.copy()
        self._numbers = {"": 0} | {
            name: 1 + sorted({*adapters.values()}).index(fingerprint)
            for name, fingerprint in adapters.items()
        }
        self._made_by = np.zeros((num_pages, page_size), dtype=np.int32)
        self._sums = np.full(
            (num_pages, page_size), UNKNOWN, dtype=np.int64
        )  # hashes of all tokens up to the slot's
        self._window_kv = np.full((num_window_pages, page_size), UNWRITTEN, dtype=np.int32)
        self._saved: dict[int, tuple[NDArray[np.int32], ...]] = {}
        self._spilled: dict[int, tuple[NDArray[np.int32], ...]] = {}
        self._copies: CopyQueue = []
        self._disk_copies: CopyQueue = []

    def launch(self, batch: ScheduledBatch) -> Done:
        return Done(self._steps.run(batch, self.execute))

    def describe(self) -> dict[str, str | int | float | bool]:
        return {"runner": "null", "model_fingerprint": self.facts.identity.weights}

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Writes every item's tokens before any item reads, as a real step does layer by layer."""
        quick = [] if self._poison else [item for item in batch.items if self._decodes_plainly(item)]
        decoded = dict(zip(map(id, quick), self._decode(quick), strict=True)) if quick else {}
        others = [item for item in batch.items if id(item) not in decoded] if quick else batch.items
        proposed = [self._draft(item) for item in others]
        for item, drafts in zip(others, proposed, strict=True):
            self._write(item, drafts)
        run = iter([self._run(item, drafts) for item, drafts in zip(others, proposed, strict=True)])
        return ModelOutput([decoded[id(item)] if id(item) in decoded else next(run) for item in batch.items])

    def forget(self, pages: Iterable[int], window_pages: Iterable[int] = ()) -> None:
        """Marks pages as unwritten, so that with `poison` a read fails if somebody still uses them."""
        self._kv[list(pages)] = UNWRITTEN
        self._sums[list(pages)] = UNKNOWN
        self._draft_kv[list(pages)] = UNWRITTEN
        self._window_kv[list(window_pages)] = UNWRITTEN

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        def copy() -> None:
            full, window = pages.full, pages.window
            parts = self._kv[full], self._draft_kv[full], self._window_kv[window], self._made_by[full]
            self._saved[key] = tuple(part.copy() for part in parts)

        return self._start(copy, self._copies)

    def spill(self, source: int, key: int) -> Future[None]:
        def copy() -> None:
            self._spilled[key] = self._saved[source]

        return self._start(copy, self._disk_copies)

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        def copy() -> None:
            parts = self._spilled[key] if key in self._spilled else self._saved[key]
            full, window = pages.full, pages.window
            self._kv[full], self._draft_kv[full], self._window_kv[window], self._made_by[full] = parts
            self._sums[pages.full] = UNKNOWN

        return self._start(copy, self._disk_copies if key in self._spilled else self._copies)

    def drop(self, key: int) -> None:
        del (self._spilled if key in self._spilled else self._saved)[key]

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        self._kv[target.full] = self._kv[source.full]
        self._sums[target.full] = self._sums[source.full]
        self._made_by[target.full] = self._made_by[source.full]
        self._draft_kv[target.full] = self._draft_kv[source.full]
        self._window_kv[target.window] = self._window_kv[source.window]

    def close(self) -> None:
        self.end_copies(len(self._copies))
        self.end_disk_copies(len(self._disk_copies))

    def end_copies(self, count: int = 1, error: Exception | None = None) -> None:
        """The oldest `count` copies in flight between device and host happen now, or fail with `error`."""
        _end_copies(self._copies, count, error)

    def end_disk_copies(self, count: int = 1, error: Exception | None = None) -> None:
        """The oldest `count` copies in flight to and from the disk happen now, or fail with `error`."""
        _end_copies(self._disk_copies, count, error)

    def _start(self, copy: Callable[[], None], queue: CopyQueue) -> Future[None]:
        future: Future[None] = Future()
        queue.append((future, copy))
        if not self._copies_wait:
            _end_copies(queue, 1, None)
        return future

    def _decodes_plainly(self, item: BatchItem) -> bool:
        """Whether the item is a greedy decode of one token that asks for nothing else, and the hash before it is
        known."""
        sample, last = item.sample, item.start - 1
        if (
            sample is None
            or len(item.token_ids) != 1
            or last < 0
            or item.num_drafts
            or item.draft is not None
        ):
            return False
        if item.window_pages is not None or item.input_logprobs_from is not None or len(self._numbers) > 1:
            return False
        if sample.logprobs or sample.allowed is not None or _salt(sample.params):
            return False
        return bool(self._sums[item.pages[last // self._page_size], last % self._page_size] != UNKNOWN)

    def _decode(self, items: Sequence[BatchItem]) -> list[ItemOutput]:
        """One token for each item. All of them satisfy `_decodes_plainly`."""
        size = self._page_size
        tokens = [item.token_ids[0] for item in items]
        ends = [item.start for item in items]
        slots = [item.pages[end // size] * size + end % size for item, end in zip(items, ends, strict=True)]
        before = [
            item.pages[(end - 1) // size] * size + (end - 1) % size
            for item, end in zip(items, ends, strict=True)
        ]
        kv_S, sums_S = self._kv.reshape(-1), self._sums.reshape(-1)
        kv_S[slots] = tokens
        parts = np.array(tokens, dtype=np.int32).tobytes()
        digests = [
            zlib.crc32(parts[BYTES_PER_TOKEN * place : BYTES_PER_TOKEN * (place + 1)], digest)
            for place, digest in enumerate(sums_S[before].tolist())
        ]
        sums_S[slots] = digests
        return [
            ItemOutput((_token_of(digest, self._vocab_size, self._eos_probability),)) for digest in digests
        ]

    def _draft(self, item: BatchItem) -> list[int]:
        """The drafts to verify. They come from the n-gram proposer, or from the draft model, whose KV must be
        complete."""
        drafts = list(item.token_ids[len(item.token_ids) - item.num_drafts :])
        if item.draft is not None:
            assert not drafts, f"{item.request_id}: drafts from two proposers"
            self._draft_write(item, item.draft.start, item.draft.token_ids)
            drafts = self._draft_tokens(item, item.draft)
        return drafts

    def _draft_tokens(self, item: BatchItem, work: DraftWork) -> list[int]:
        end = work.start + len(work.token_ids)
        in_step = end == item.start + len(item.token_ids)
        assert in_step or not work.count, f"{item.request_id}: the draft model is not in step"
        drafts: list[int] = []
        for position in range(end, end + work.count):
            known = self._draft_kv[self._pages_of(item, position)].reshape(-1)[:position]
            assert known.min() != UNWRITTEN, (
                f"{item.request_id}: the draft model reads what it never computed"
            )
            token = _next_token(known, self._vocab_size, self._eos_probability, 0)
            if zlib.crc32(known.tobytes(), 1) >= self._draft_accuracy * 2**32:
                token = 1 + token % (self._vocab_size - 1)
            drafts.append(token)
            if len(drafts) < work.count:
                self._draft_write(item, position, [token])
        return drafts

    def _draft_write(self, item: BatchItem, start: int, token_ids: Sequence[int]) -> None:
        positions = np.arange(start, start + len(token_ids))
        pages = self._pages_of(item, start + len(token_ids))
        self._draft_kv[pages[positions // self._page_size], positions % self._page_size] = token_ids

    def _write(self, item: BatchItem, drafts: Sequence[int]) -> None:
        assert item.token_ids, f"{item.request_id}: an item without tokens"
        certain = item.token_ids[: len(item.token_ids) - item.num_drafts]
        tokens = np.asarray([*certain, *drafts], dtype=np.int32)
        end = item.start + len(tokens)
        assert end <= self._max_context_len, f"{item.request_id}: {end} tokens exceed the context"
        assert tokens.min() >= 0, f"{item.request_id}: negative token id"
        assert tokens.max() < self._vocab_size, f"{item.request_id}: token id past the vocabulary"
        pages = self._pages_of(item, end)
        positions = np.arange(item.start, end)
        slots = pages[positions // self._page_size], positions % self._page_size
        self._kv[slots] = tokens
        self._sums[slots] = UNKNOWN
        self._made_by[slots] = self._numbers[item.adapter]
        if item.window_pages is not None:
            window_pages = item.window_pages[positions // self._page_size]
            assert window_pages.min() >= 0, f"{item.request_id}: writes to a window page that is gone"
            self._window_kv[window_pages, positions % self._page_size] = tokens

    def _pages_of(self, item: BatchItem, num_tokens: int) -> NDArray[np.int32]:
        count = -(-num_tokens // self._page_size)
        pages = item.pages[:count]
        assert len(pages) == count, f"{item.request_id}: {len(pages)} pages for {num_tokens} tokens"
        assert pages.min() >= 0, f"{item.request_id}: negative page"
        assert pages.max() < self._num_pages, f"{item.request_id}: page outside the pool"
        if item.contiguous:
            assert (np.diff(pages) == 1).all(), f"{item.request_id}: pages are not one ascending run"
        return pages

    def _run(self, item: BatchItem, drafts: Sequence[int]) -> ItemOutput:
        end = item.certain_len
        sequence = self._read(item, end + len(drafts))
        input_logprobs = self._input_logprobs(item, sequence)
        if item.sample is None:
            assert not drafts, f"{item.request_id}: drafts that nobody verifies"
            return ItemOutput((), input_logprobs=input_logprobs)
        salt, tokens = _salt(item.sample.params), []
        for length in range(end, end + len(drafts) + 1):
            digest = zlib.crc32(sequence[:length].tobytes(), salt)
            token = _token_of(digest, self._vocab_size, self._eos_probability)
            if not self._poison and not salt:
                last = length - 1
                self._sums[item.pages[last // self._page_size], last % self._page_size] = digest
            if item.sample.allowed is not None:
                token = nearest_allowed(token, item.sample.allowed)
            tokens.append(token)
            if length < end + len(drafts) and token != sequence[length]:
                break
        logprobs: tuple[TokenLogprob, ...] = ()
        if item.sample.logprobs:
            logprobs = tuple(_fake_logprob(token, [token] * item.sample.top_logprobs) for token in tokens)
        return ItemOutput(tuple(tokens), logprobs, input_logprobs, len(drafts))

    def _input_logprobs(self, item: BatchItem, sequence: NDArray[np.int32]) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the positions start+1 .. start+len (one more with `next_token`), and of position 0, but
        only from `input_logprobs_from` on. The top token of each is the one that a greedy request would have picked
        there."""
        if item.input_logprobs_from is None:
            return ()
        known = [*item.token_ids] if item.next_token is None else [*item.token_ids, item.next_token]
        scored = []
        if item.input_logprobs_from <= 0 == item.start:
            scored.append(TokenLogprob(known[0], None))
        first = max(item.input_logprobs_from, item.start + 1)
        for position in range(first, item.start + len(known)):
            top: list[int] = []
            if item.top_input_logprobs:
                picked = _next_token(sequence[:position], self._vocab_size, self._eos_probability, 0)
                top = [picked] * item.top_input_logprobs
            scored.append(_fake_logprob(known[position - item.start], top))
        return tuple(scored)

    def _read(self, item: BatchItem, end: int) -> NDArray[np.int32]:
        """The sequence's tokens as its KV holds them. The KV in its window pages must agree."""
        pages = self._pages_of(item, end)
        sequence = self._kv[pages].reshape(-1)[:end]
        if self._poison and sequence.min() == UNWRITTEN:
            position = int(np.argmax(sequence == UNWRITTEN))
            page = int(pages[position // self._page_size])
            raise AssertionError(f"{item.request_id}: position {position} reads page {page}, never written")
        made_by = self._made_by[pages].reshape(-1)[:end]
        assert (made_by == self._numbers[item.adapter]).all(), f"{item.request_id}: KV of another adapter"
        if self._window_len is not None:
            assert item.window_pages is not None, f"{item.request_id}: no window pages"
            seen = np.arange(max(0, item.start - self._window_len + 1), end)
            window_pages = item.window_pages[seen // self._page_size]
            assert window_pages.min() >= 0, f"{item.request_id}: reads a window page that is gone"
            held = self._window_kv[window_pages, seen % self._page_size]
            assert (held == sequence[seen]).all(), f"{item.request_id}: window KV of other tokens"
        return sequence


def _end_copies(queue: CopyQueue, count: int, error: Exception | None) -> None:
    for _ in range(min(count, len(queue))):
        future, copy = queue.pop(0)
        if error is not None:
            future.set_exception(error)
        else:
            copy()
            future.set_result(None)


def null_generate(
    tokens: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    eos_probability: float = 0.0,
    params: SamplingParams | None = None,
) -> list[int]:
    """The oracle: the `count` tokens that NullRunner produces after `tokens`. They end early with EOS_TOKEN_ID, which
    is included. Greedy unless `params` samples; a sampled seed of 0 equals greedy."""
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


def nearest_allowed(token: int, allowed: bytes) -> int:
    """The token that NullRunner picks in place of `token` under a mask (SampleSpec.allowed): the first allowed one from
    `token` on, else the first allowed one of all."""
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little"))
    return int(ids[np.searchsorted(ids, token) % len(ids)])


def _salt(params: SamplingParams) -> int:
    return 0 if params.greedy else params.seed & 0xFFFFFFFF


def _next_token(sequence: NDArray[np.int32], vocab_size: int, eos_probability: float, salt: int) -> int:
    return _token_of(zlib.crc32(sequence.tobytes(), salt), vocab_size, eos_probability)


def _token_of(digest: int, vocab_size: int, eos_probability: float) -> int:
    if eos_probability and zlib.crc32(digest.to_bytes(4, "little")) < eos_probability * 2**32:
        return EOS_TOKEN_ID
    return 1 + digest % (vocab_size - 1)


def _fake_logprob(token: int, top: Sequence[int]) -> TokenLogprob:
    return TokenLogprob(token, FAKE_LOGPROB, tuple((token_id, FAKE_LOGPROB) for token_id in top))
