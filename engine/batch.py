"""What the scheduler hands the runner and what comes back. Plain data: integers, arrays of integers, floats.

One mechanism serves extend, decode and verify: an item computes a number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams, TokenLogprob

PENDING = -1


@dataclass(slots=True, eq=False, weakref_slot=True)
class SeenTokens:
    """What penalties go by. `prompt` has each token of the input at least once (none if no penalty asks for them),
    `output` every token that was picked, in order; it only grows. A run of a request has one, and the runner may keep
    what it made of it (engine/runner/penalties.py): owned by the live request, which the runner only reads."""

    prompt: NDArray[np.int64]
    output: list[int]


@dataclass(slots=True)
class SampleSpec:
    """How to pick the token that follows an item's last certain token (proposals come after it). A request has one for
    all items of a run, but for `allowed`.

    `allowed` has a bit for each token of the vocabulary, the least significant first: no other is picked. An item with
    it has no proposals.
    """

    params: SamplingParams
    seen: SeenTokens | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    allowed: bytes | None = None

    @property
    def edits_logits(self) -> bool:
        """True if the pick is not of the model's own logits."""
        return self.allowed is not None or self.params.edits_logits


@dataclass(slots=True)
class DraftWork:
    """What the draft model does for an item before the target runs: computes its own KV of `token_ids` at positions
    start .. start+len-1 (they end with the item's last certain token), then proposes `count` tokens more, whose
    draft KV, but for the last, is computed on the way. Draft KV lies in the item's pages, in a pool of its own.
    """

    start: int
    token_ids: Sequence[int]
    count: int


@dataclass(slots=True)
class BatchItem:
    """One request's share of a step: run `token_ids` at positions start .. start+len-1.

    `pages` is a read-only int32 view of the page table that covers at least start+len tokens (and `draft.count` more);
    token i lives in page `pages[i // page_size]` at offset `i % page_size`. `contiguous` says that the pages are one
    ascending run. `window_pages` is the same for the pool of sliding-window layers, -1 where pages have left the
    window; None without such layers. `sample` is None while the prompt is not finished.

    `run` is a number for one run of a request, between two retractions, that nothing else bears (0: it has none). Of
    the tables the first `known_pages` and `known_window_pages` entries are as in the run's item before.

    With `pending_from` the item's one token is not known yet, and stands as PENDING in `token_ids`: it is the last
    one that the item of that index in the batch launched before picks.

    The last `num_drafts` of `token_ids` are proposals of the n-gram proposer; `draft` asks the draft model for some.
    Either way the step verifies them. `input_logprobs_from` asks for the log-probability of each input token at
    absolute positions p with input_logprobs_from <= p <= start+len (the one at start+len is only known when it is
    an input token: the runner is given it in `next_token`).
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    pages: NDArray[np.int32]
    contiguous: bool
    sample: SampleSpec | None
    run: int = 0
    pending_from: int | None = None
    window_pages: NDArray[np.int32] | None = None
    next_token: int | None = None
    num_drafts: int = 0
    draft: DraftWork | None = None
    input_logprobs_from: int | None = None
    top_input_logprobs: int = 0
    known_pages: int = 0
    known_window_pages: int = 0

    @property
    def certain_len(self) -> int:
        """Tokens of the sequence once it is computed, without proposals: the position of the token to be picked."""
        return self.start + len(self.token_ids) - self.num_drafts

    @property
    def num_tokens(self) -> int:
        """Tokens it computes, proposals included."""
        return len(self.token_ids) + (self.draft.count if self.draft is not None else 0)


@dataclass(slots=True)
class ScheduledBatch:
    """The items of one step, decodes and extends mixed. Never empty.

    With `num_steps` > 1 it is that many steps in one go: every item computes one token, samples, and goes on with what
    it picked; its pages cover them all, and its output has that many tokens. No item of it has drafts, edits logits or
    asks for log-probabilities.
    """

    items: list[BatchItem]
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_steps * sum(item.num_tokens for item in self.items)


@dataclass(slots=True)
class ItemOutput:
    """Result of one item: accepted tokens (empty mid-prefill) and any log-probabilities asked for.

    All of `token_ids` but the last are proposals that the target agreed with; the last is the target's own choice.
    `num_proposed` counts the proposals that were verified.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    input_logprobs: tuple[TokenLogprob, ...] = ()
    num_proposed: int = 0


@dataclass(slots=True)
class ModelOutput:
    """Outputs in the order of the batch's items."""

    items: list[ItemOutput]
