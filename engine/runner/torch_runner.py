"""The Runner for any device: one forward pass over every token of a batch, then tokens for each item that samples.

It can do everything that a request may ask for, one step at a time: a GPU's runner leaves to it what needs the host in
the middle of a step.

Legend: N tokens, R sampled rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from cache.tiers import PoolPages
from cache.token_chain import ANY_KV, KVIdentity
from engine.api import TokenLogprob
from engine.attention.interface import AttentionBackend
from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch
from engine.device import device_name, dtype_name
from engine.models.protocol import AdaptedModel, CausalModel
from engine.runner.draft_model import DraftModel
from engine.runner.host_copies import HostCopies
from engine.runner.inputs import adapter_rows, make_inputs
from engine.runner.kv_pool import KVPool
from engine.runner.penalties import PenaltyTable
from engine.runner.protocol import Done, RunnerFacts
from engine.runner.sampler import token_logprobs
from engine.runner.stepping import StepByStep
from engine.runner.verify import choose_tokens

LOGPROB_ELEMENTS = 16 * 1024 * 1024
"""The most logits held at once while input tokens are scored."""


class TorchRunner:
    """A Runner. Composed by engine/build_runner.py from a loaded model, a pool and the attention over that pool.
    `copies` must belong to the same pool and, if there is one, to the draft model's.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        attention: AttentionBackend,
        vocab_size: int,
        max_context_len: int,
        draft: DraftModel | None = None,
        copies: HostCopies | None = None,
        *,
        about: Mapping[str, str | int | float | bool] | None = None,
        identity: KVIdentity = ANY_KV,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._vocab_size = vocab_size
        self._draft = draft
        self.facts = _facts(pool, draft, vocab_size, max_context_len, identity, adapters or {})
        if draft is not None:
            assert (draft.kv.num_pages, draft.kv.page_size) == (pool.num_pages, pool.page_size)
        self._copies = copies or HostCopies(pool, None if draft is None else draft.kv)
        self._device = pool.full.kv_LJKSD.device
        self._about = about or {}
        self._steps = StepByStep()
        self._penalties = PenaltyTable()

    def launch(self, batch: ScheduledBatch) -> Done:
        return Done(self._steps.run(batch, self.execute))

    def describe(self) -> dict[str, str | int | float | bool]:
        return {
            "runner": "torch",
            "model_fingerprint": self.facts.identity.weights,
            "device": device_name(self._device),
            "dtype": dtype_name(self._pool.full.kv_LJKSD.dtype),
            **self._about,
        }

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        return self.run(self.with_drafts(batch))

    @torch.inference_mode()
    def rehearse_drafts(self, num_tokens: int, longest: int) -> None:
        """See DraftModel.rehearse. Without a draft model nothing is done."""
        if self._draft is not None:
            self._draft.rehearse(num_tokens, longest)

    @torch.inference_mode()
    def with_drafts(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch with the draft model's proposals, computed now."""
        if self._draft is None:
            return batch
        return ScheduledBatch(self._draft.propose(batch.items), batch.num_steps)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """One step of a batch whose tokens are all known, proposals included."""
        if not any(item.adapter for item in batch.items):
            return self._run(batch)
        places = sorted(range(len(batch.items)), key=lambda place: batch.items[place].adapter)
        outputs = self._run(ScheduledBatch([batch.items[place] for place in places])).items
        found = dict(zip(places, outputs, strict=True))
        return ModelOutput([found[place] for place in range(len(places))])

    def _run(self, batch: ScheduledBatch) -> ModelOutput:
        """The same for a batch in which the items of each adapter stand together."""
        inputs = make_inputs(batch, self._pool.page_size, self._device)
        attend = self._attention.begin(inputs.attention, inputs.slots_PN)
        rows = adapter_rows(batch.items)
        if rows is None:
            hidden_NE = self._model.forward(inputs.tokens_N, inputs.positions_N, attend)
        else:
            assert isinstance(self._model, AdaptedModel)
            hidden_NE = self._model.forward_adapted(inputs.tokens_N, inputs.positions_N, attend, rows)
        hidden_RE = hidden_NE if inputs.sample_rows_R is None else hidden_NE[inputs.sample_rows_R]
        outputs = self._choose(batch.items, hidden_RE)
        self._score_inputs(batch.items, hidden_NE, outputs)
        return ModelOutput(outputs)

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        return self._copies.save(key, pages)

    def spill(self, source: int, key: int) -> Future[None]:
        return self._copies.spill(source, key)

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        return self._copies.load(key, pages)

    def drop(self, key: int) -> None:
        self._copies.drop(key)

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        self._copies.clone(source, target)

    def close(self) -> None:
        """Waits for running copies. Nothing may be called afterwards."""
        self._copies.close()

    def _choose(self, items: list[BatchItem], hidden_RE: Tensor) -> list[ItemOutput]:
        """One output per item, in order; outputs of items that do not sample are empty."""
        sampling = [item for item in items if item.sample is not None]
        if not sampling:
            return [ItemOutput(()) for _ in items]
        chosen = choose_tokens(self._model.logits(hidden_RE), sampling, self._penalties)
        if len(sampling) == len(items):
            return chosen
        rest = iter(chosen)
        return [ItemOutput(()) if item.sample is None else next(rest) for item in items]

    def _score_inputs(self, items: list[BatchItem], hidden_NE: Tensor, outputs: list[ItemOutput]) -> None:
        row = 0
        for item, output in zip(items, outputs, strict=True):
            if item.input_logprobs_from is not None:
                output.input_logprobs = self._input_logprobs(item, hidden_NE, row)
            row += len(item.token_ids)

    def _input_logprobs(self, item: BatchItem, hidden_NE: Tensor, row: int) -> tuple[TokenLogprob, ...]:
        """Position p is scored by the row of token p - 1, so this step scores positions start + 1 to start + len (the
        latter with `next_token`). Position 0 follows nothing and has no logprob."""
        assert item.input_logprobs_from is not None
        known = [*item.token_ids] if item.next_token is None else [*item.token_ids, item.next_token]
        scored: list[TokenLogprob] = []
        if item.input_logprobs_from <= 0 and item.start == 0:
            scored.append(TokenLogprob(known[0], None))
        first = max(item.input_logprobs_from - item.start, 1)
        stride = max(1, LOGPROB_ELEMENTS // self._vocab_size)
        for begin in range(first, len(known), stride):
            tokens = known[begin : begin + stride]
            rows = hidden_NE[row + begin - 1 : row + begin - 1 + len(tokens)]
            tops = [item.top_input_logprobs] * len(tokens)
            scored += token_logprobs(self._model.logits(rows), tokens, tops)
        return tuple(scored)


def _facts(
    pool: KVPool,
    draft: DraftModel | None,
    vocab_size: int,
    max_context_len: int,
    identity: KVIdentity,
    adapters: Mapping[str, str],
) -> RunnerFacts:
    window = pool.window
    return RunnerFacts(
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        page_size_bytes=pool.full.page_size_bytes + (0 if draft is None else draft.kv.page_size_bytes),
        vocab_size=vocab_size,
        max_context_len=max_context_len,
        window_len=pool.layout.window,
        num_window_pages=0 if window is None else window.num_pages,
        window_page_size_bytes=0 if window is None else window.page_size_bytes,
        identity=identity,
        adapters=adapters,
    )
