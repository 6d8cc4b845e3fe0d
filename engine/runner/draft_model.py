"""A small model that guesses what the large one will generate. Its KV lies in the same pages, in a pool of its own.

It always guesses the likeliest token. A guess can only cost time (see verify.py), so draft KV that was never written,
or that belongs to other tokens, only makes guesses worse.

Legend: N tokens of all items, R rows whose logits make a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cache.sequence_kv import pages_for
from engine.api import SamplingParams
from engine.attention.interface import AttentionBackend
from engine.batch import BatchItem, DraftWork, SampleSpec, ScheduledBatch
from engine.models.errors import UnsupportedModel
from engine.models.protocol import CausalModel
from engine.runner.inputs import make_inputs
from engine.runner.kv_pool import KVPool, PagedKV
from engine.runner.sampler import argmax_rows

_GREEDY = SamplingParams(temperature=0.0)


class DraftModel:
    """Called by the runner before each step of the target. `pool` has as many pages as the target's, of the same size,
    and the model the target's vocabulary. It proposes nothing past `max_context_len`, its own limit."""

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        attention: AttentionBackend,
        max_context_len: int,
    ) -> None:
        """Raises UnsupportedModel for a model with sliding-window layers."""
        if pool.window is not None:
            raise UnsupportedModel("a draft model needs full attention in every layer, this one has a window")
        self._model = model
        self._pool = pool
        self._attention = attention
        self._max_context_len = max_context_len
        self._device = pool.full.kv_LJKSD.device

    @property
    def kv(self) -> PagedKV:
        return self._pool.full

    def rehearse(self, num_tokens: int, longest: int) -> None:
        """Runs a step of so many tokens, in items of `longest` and one with the rest, as far as they fit, in pages that
        nobody uses yet. Compiles its kernels, and shows whether there is memory for it."""
        fitting = min(longest, self._max_context_len, self.kv.num_pages * self.kv.page_size)
        pages = np.arange(pages_for(fitting, self.kv.page_size), dtype=np.int32)
        sample = SampleSpec(_GREEDY)
        lens = [min(fitting, num_tokens - first) for first in range(0, num_tokens, longest)]
        self._run([BatchItem("", [0] * length, 0, pages, True, sample) for length in lens])

    def propose(self, items: Sequence[BatchItem]) -> list[BatchItem]:
        """The items to verify: the items whose `draft` asks for proposals now end with them.

        The first pass takes every item's `draft.token_ids`; later passes take one token of each item that wants more.
        """
        outputs = list(items)
        proposals: dict[int, list[int]] = {}  # by index in `items`
        wanted: dict[int, int] = {}
        work: list[BatchItem] = []
        for index, item in enumerate(items):
            if item.draft is not None and (part := self._first_pass(item, item.draft)) is not None:
                work.append(part)
                if part.sample is not None:
                    proposals[index] = []
                    wanted[index] = self._count(item.draft)
        unfinished = list(wanted)
        while work:
            for index, token in zip(unfinished, self._run(work), strict=True):
                proposals[index].append(token)
            unfinished = [index for index in unfinished if len(proposals[index]) < wanted[index]]
            work = [_one_token(items[index], proposals[index]) for index in unfinished]
        for index, tokens in proposals.items():
            item = items[index]
            outputs[index] = replace(item, token_ids=[*item.token_ids, *tokens], num_drafts=len(tokens))
        return outputs

    def _count(self, draft: DraftWork) -> int:
        """How many proposals fit: the one at the end of the context needs no KV."""
        return min(draft.count, self._max_context_len - draft.start - len(draft.token_ids) + 1)

    def _first_pass(self, item: BatchItem, draft: DraftWork) -> BatchItem | None:
        tokens = draft.token_ids[: max(0, self._max_context_len - draft.start)]
        if not tokens:
            return None
        part = _part(item, tokens, draft.start)
        if self._count(draft) < 1:
            part.sample = None
        else:
            assert item.num_drafts == 0, "an item has one proposer"
            assert item.start + len(item.token_ids) == draft.start + len(tokens)
        return part

    def _run(self, work: list[BatchItem]) -> list[int]:
        """Computes draft KV and picks a token for each item that samples."""
        inputs = make_inputs(ScheduledBatch(work), self._pool.page_size, self._device)
        attend = self._attention.begin(inputs.attention, inputs.slots_PN)
        hidden_NE = self._model.forward(inputs.tokens_N, inputs.positions_N, attend)
        rows_R = inputs.sample_rows_R
        if rows_R is not None and len(rows_R) == 0:
            return []
        return argmax_rows(self._model.logits(hidden_NE if rows_R is None else hidden_NE[rows_R]))


def _part(item: BatchItem, token_ids: Sequence[int], start: int) -> BatchItem:
    """The draft model's view of an item, which samples at its end."""
    return BatchItem(item.request_id, token_ids, start, item.pages, item.contiguous, SampleSpec(_GREEDY))


def _one_token(item: BatchItem, proposals: list[int]) -> BatchItem:
    return _part(item, proposals[-1:], item.start + len(item.token_ids) + len(proposals) - 1)
