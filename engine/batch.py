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
    """The tokens that penalties depend on. `prompt` has each token of the input at least once (empty if no penalty
    needs them). `output` has every picked token in order; it only grows. Each run of a request has its own. The live
    request owns it; the runner only reads it, and may keep what it derived from it (engine/runner/penalties.py)."""

    prompt: NDArray[np.int64]
    output: list[int]


@dataclass(slots=True)
class SampleSpec:
    """How to pick the token that follows an item's last certain token (proposals come after it). All items of a run
    share one, except for `allowed`.

    `allowed` has a bit for each token of the vocabulary, the least significant first; only these tokens may be picked.
    An item with `allowed` has no proposals.
    """

    params: SamplingParams
    seen: SeenTokens | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    allowed: bytes | None = None

    @property
    def edits_logits(self) -> bool:
        """True if the token is not picked from the model's unchanged logits."""
        return self.allowed is not None or self.params.edits_logits


@dataclass(slots=True)
class DraftWork:
    """What the draft model does for an item before the target runs. It computes its own KV of `token_ids` at positions
    start .. start+len-1 (they end with the item's last certain token). Then it proposes `count` more tokens; their
    draft KV, except for the last, is computed on the way. Draft KV lies in the item's pages, in a pool of its own."""

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

    `run` is a unique number of one run of a request, between two retractions (0: it has none). The first `known_pages`
    and `known_window_pages` entries of the tables are unchanged since the previous item of the run.

    With `pending_from` the item's one token is not known yet, and `token_ids` has PENDING in its place. It is the last
    token that item number `pending_from` of the previously launched batch picks.

    The last `num_drafts` of `token_ids` are proposals of the n-gram proposer; `draft` asks the draft model for
    proposals. Either way the step verifies them. `input_logprobs_from` asks for the log-probability of each input token
    at absolute positions p with input_logprobs_from <= p <= start+len. The token at start+len is not among `token_ids`:
    the runner is given it in `next_token` if it is an input token.

    `adapter` is the name of the adapter that its tokens are computed with; "" is none.
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
    adapter: str = ""

    @property
    def certain_len(self) -> int:
        """Length of the sequence once the item is computed, without proposals: the position of the token to be
        picked."""
        return self.start + len(self.token_ids) - self.num_drafts

    @property
    def num_tokens(self) -> int:
        """Tokens that the item computes, proposals included."""
        return len(self.token_ids) + (self.draft.count if self.draft is not None else 0)

    @property
    def budget_tokens(self) -> int:
        """What the item takes of a step's budget: the tokens of the model's pass, or those of the draft model's first
        pass if they are more."""
        return max(self.num_tokens, 0 if self.draft is None else len(self.draft.token_ids))


@dataclass(slots=True)
class ScheduledBatch:
    """The items of one step, decodes and extends mixed. Never empty.

    With `num_steps` > 1 the batch runs that many steps in one launch. Every item computes one token, samples, and
    continues with what it picked. Its pages cover all these steps, and its output has that many tokens. No item of such
    a batch has drafts, edits logits or asks for log-probabilities.
    """

    items: list[BatchItem]
    num_steps: int = 1


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
