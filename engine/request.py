"""LiveRequest: one generation on its way through the scheduler, and the tokens it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

import numpy as np

from cache.history import History
from cache.prefix_cache import token_array
from cache.radix_tree import TokenArray
from cache.sequence_kv import SequenceKV
from engine.api import Finish, GenerateRequest, TokenDelta, TokenLogprob
from engine.batch import BatchItem, SampleSpec, SeenTokens
from engine.token_rules import TokenRules


class TokenSequence:
    """The history (by reference, its first `history_len` tokens) followed by this request's own tokens."""

    __slots__ = ("_array", "_history", "_history_len", "_own", "append")

    def __init__(self, history: Sequence[int], history_len: int, new_tokens: Sequence[int]) -> None:
        self._history = history
        self._history_len = history_len
        self._own = list(new_tokens)
        self._array: TokenArray | None = None
        self.append = self._own.append

    def __len__(self) -> int:
        return self._history_len + len(self._own)

    def at(self, position: int) -> int:
        offset = position - self._history_len
        return self._own[offset] if offset >= 0 else self._history[position]

    def __getitem__(self, part: slice) -> Sequence[int]:
        return self.slice(part.start, part.stop)

    def slice(self, start: int, end: int) -> Sequence[int]:
        """Tokens start .. end-1. Costs their number, not the history's length."""
        if start >= self._history_len:
            return self._own[start - self._history_len : end - self._history_len]
        head = list(self._history[start : min(end, self._history_len)])
        return head + self._own[: max(0, end - self._history_len)]

    def latest(self, count: int) -> Sequence[int]:
        """The last `count` tokens. The request must have that many of its own."""
        return self._own[len(self._own) - count :]

    def array(self, end: int | None = None) -> TokenArray:
        """The first `end` tokens (all by default) as an array. Costs the number of all tokens, once until the next
        append."""
        if self._array is None or len(self._array) < len(self):
            self._array = token_array(self.slice(0, len(self)))
        return self._array[:end]


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class LiveRequest:
    """State of one request, owned by the scheduler (the engine's thread).

    While RUNNING it owns `kv`; otherwise `kv` is None. `in_flight` counts its steps that are launched and not yet
    answered. Once they are done, the KV of `launched_len` tokens is computed, and `num_pending` tokens follow the known
    ones; `total_len` includes those. If the step launched last has drafts (`awaits_drafts`), more may follow. After the
    prompt, `launched_len` is all tokens but the last. `run` is 0 unless the request is RUNNING.

    What never changes is computed once, since a step needs it for every token: `sample` for its items, `stop_ids`,
    `longest_output` and `rules` (see StopCriteria, which removes rules that no longer apply).
    """

    __slots__ = ("accepted_draft_tokens", "arrival", "arrived_s", "awaits_drafts", "cached_tokens",
                 "draft_tokens", "history", "in_flight", "kv", "launched_len", "longest_output",
                 "next_input_logprob", "num_output", "num_pending", "place", "prompt_len", "queued_s",
                 "request_id", "rules", "run", "sample", "seen", "shares_prompt", "spec", "status", "stop_ids",
                 "tokens", "total_len")  # fmt: skip

    def __init__(self, spec: GenerateRequest, arrival: int, arrived_s: float = 0.0) -> None:
        self.spec = spec
        self.arrived_s = arrived_s
        self.queued_s = 0.0
        self.request_id = spec.request_id
        self.arrival = arrival
        self.tokens = TokenSequence(spec.history, spec.history_len, spec.new_tokens)
        self.history = History(spec.history, spec.history_len, spec.history_chain)
        self.prompt_len = self.total_len = spec.prompt_len
        self.status = Status.WAITING
        self.kv: SequenceKV | None = None
        self.run = 0
        self.in_flight = 0
        self.awaits_drafts = False
        self.launched_len = 0
        self.num_pending = 0
        self.place = 0  # index of its item in the batch launched last
        self.num_output = 0
        self.cached_tokens: int | None = None
        self.shares_prompt = False
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self.seen: SeenTokens | None = None  # while it runs, if there are penalties
        self.sample = _sample(spec)
        self.stop_ids = spec.sampling.stop_token_ids
        self.longest_output = spec.sampling.max_new_tokens
        self.rules: TokenRules | None = None
        logprobs = None if spec.resumed_tokens else spec.logprobs
        self.next_input_logprob = logprobs.input_start if logprobs is not None else None

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first: higher priority, then earlier arrival."""
        return (-self.spec.priority, self.arrival)

    @property
    def rollback_len(self) -> int:
        """The length that its session's KV goes back to if it fails; 0 without a session."""
        return self.spec.history_len if self.spec.session_id is not None else 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV the next steps must compute."""
        return self.total_len - self.launched_len

    @property
    def output_left(self) -> int:
        """Tokens that it may still pick, besides the pending ones."""
        return self.longest_output - self.num_output - self.num_pending

    @property
    def max_prefix_len(self) -> int:
        """How much KV may be reused. One token is left to compute for its logits, more if log-probabilities of the
        input are asked for."""
        limit = len(self.tokens) - 1
        if self.next_input_logprob is not None:
            limit = min(limit, max(self.next_input_logprob - 1, 0))
        return limit

    @property
    def recomputes_history(self) -> bool:
        """Whether log-probabilities of its session's history are asked for."""
        return self.next_input_logprob is not None and self.next_input_logprob < self.spec.history_len

    def begin_run(self, run: int) -> None:
        """The request has its KV and joins the running ones."""
        assert self.kv is not None
        self.run = run
        self.launched_len = self.kv.committed_len
        self.status = Status.RUNNING
        self.kv.sent_pages = 0
        if self.kv.window is not None:
            self.kv.window.sent_pages = 0
        if self.sample is not None and self.spec.sampling.penalizes:
            self.seen = self._see(self.kv)
            self.sample = replace(self.sample, seen=self.seen)

    def launch(self, item: BatchItem, place: int, num_steps: int) -> None:
        """Records that its item is launched, at `place` in the batch."""
        self.in_flight += 1
        self.awaits_drafts = item.num_drafts > 0
        self.place = place
        self.launched_len = item.start + len(item.token_ids) - item.num_drafts + num_steps - 1
        kv = self.kv
        assert kv is not None
        item.known_pages, kv.sent_pages = kv.sent_pages, kv.num_pages
        if kv.window is not None:
            item.known_window_pages, kv.window.sent_pages = kv.window.sent_pages, kv.window.num_pages
        if item.sample is not None:
            self.num_pending += num_steps
            self.total_len += num_steps

    def answered(self, item: BatchItem, num_steps: int, num_tokens: int) -> int:
        """Records that its oldest item came back with `num_tokens` tokens. Returns how many tokens have KV now: all but
        the last."""
        computed_len = item.start + len(item.token_ids) - item.num_drafts
        if num_tokens > 1:
            computed_len += num_tokens - 1
        self.in_flight -= 1
        if item.sample is not None:
            self.num_pending -= num_steps
            self.total_len -= num_steps
        if not self.in_flight:
            self.launched_len = computed_len
        return computed_len

    def end_run(self) -> None:
        """Lets go of its KV. Results in flight will be ignored."""
        self.kv = None
        self.total_len -= self.num_pending
        self.run = self.in_flight = self.num_pending = self.launched_len = 0

    def take_back(self, run: int) -> None:
        """Drops the tokens that were picked behind those it has, and continues from here. If some are in flight, it
        continues as a new run."""
        assert self.kv is not None
        self.kv.commit(len(self.tokens) - 1, self.kv.draft_len)
        if self.in_flight:
            self.total_len -= self.num_pending
            self.in_flight = self.num_pending = 0
            self.begin_run(run)
        else:
            self.launched_len = self.kv.committed_len

    @property
    def is_held(self) -> bool:
        """Whether its next token is restricted by a constraint or rules, given the tokens so far."""
        return self.rules is not None or self.constrained

    @property
    def constrained(self) -> bool:
        """Whether its constraint restricts the next token."""
        return self.spec.constraint is not None and self.spec.constraint.holds

    def allow(self, mask: bytes | None) -> None:
        """Sets which tokens may be next (SampleSpec.allowed)."""
        if self.sample is not None and self.sample.allowed is not mask:
            self.sample = replace(self.sample, allowed=mask)

    def accept(self, token_id: int) -> None:
        """Appends an output token."""
        self.tokens.append(token_id)
        self.total_len += 1
        self.num_output += 1
        if self.seen is not None:
            self.seen.output.append(token_id)

    def _see(self, kv: SequenceKV) -> SeenTokens:
        """Costs what is new since the session's last turn, not the length of its history: the KV's chain knows the
        distinct tokens of what has KV."""
        output = [*self.tokens.slice(self.prompt_len, len(self.tokens))]
        if self.spec.sampling.repetition_penalty == 1.0:
            return SeenTokens(np.empty(0, dtype=np.int64), output)
        known_len = min(len(kv.chain), self.prompt_len)
        others = np.asarray(self.tokens.slice(known_len, self.prompt_len), dtype=np.int64)
        return SeenTokens(np.concatenate((kv.chain.distinct(), others), dtype=np.int64), output)

    def delta(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        input_logprobs: tuple[TokenLogprob, ...] = (),
        finish: Finish | None = None,
    ) -> TokenDelta:
        """A delta of what is new; `finish` makes it the last."""
        return TokenDelta(
            self.request_id,
            token_ids,
            self.prompt_len,
            self.cached_tokens or 0,
            self.num_output,
            logprobs,
            input_logprobs,
            finish,
            self.draft_tokens,
            self.accepted_draft_tokens,
            self.queued_s,
        )


def _sample(spec: GenerateRequest) -> SampleSpec | None:
    """None if the request picks no token."""
    sampling, logprobs = spec.sampling, spec.logprobs
    if sampling.max_new_tokens == 0:
        return None
    if logprobs is None:
        return SampleSpec(sampling)
    return SampleSpec(sampling, logprobs=logprobs.output, top_logprobs=logprobs.top)
