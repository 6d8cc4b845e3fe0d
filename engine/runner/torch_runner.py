"""The real Runner: one forward pass over every token of a batch, then a token for each row that samples.

Legend: N tokens, R sampled rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.api import TokenLogprob
from engine.attention.interface import AttentionBackend
from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch
from engine.models.protocol import CausalModel
from engine.runner.inputs import make_inputs
from engine.runner.kv_pool import KVPool
from engine.runner.sampler import sample, token_logprobs

LOGPROB_ELEMENTS = 16 * 1024 * 1024
"""Most logits held at once while scoring input tokens."""


class TorchRunner:
    """A Runner. Composed by engine/build.py from a loaded model, a pool and the attention over that pool."""

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        attention: AttentionBackend,
        vocab_size: int,
        max_context_len: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._device = pool.kv_L2KSD.device

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def page_size_bytes(self) -> int:
        return self._pool.page_size_bytes

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context_len(self) -> int:
        return self._max_context_len

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        inputs = make_inputs(batch, self._pool.page_size, self._device)
        attend = self._attention.begin(inputs.attention, inputs.slots_N)
        hidden_NE = self._model.forward(inputs.tokens_N, inputs.positions_N, attend)
        hidden_RE = hidden_NE if inputs.sample_rows_R is None else hidden_NE[inputs.sample_rows_R]
        outputs = self._sample(batch.items, hidden_RE)
        self._score_inputs(batch.items, hidden_NE, outputs)
        return ModelOutput(outputs)

    def _sample(self, items: list[BatchItem], hidden_RE: Tensor) -> list[ItemOutput]:
        """One output per item, in order; those that do not sample stay empty."""
        specs = [item.sample for item in items if item.sample is not None]
        if not specs:
            return [ItemOutput(()) for _ in items]
        logits_RV = self._model.logits(hidden_RE)
        tokens = sample(logits_RV, specs)
        logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(specs)
        scored = [row for row, spec in enumerate(specs) if spec.logprobs]
        if scored:
            tops = [specs[row].top_logprobs for row in scored]
            values = token_logprobs(logits_RV[scored], [tokens[row] for row in scored], tops)
            for row, value in zip(scored, values, strict=True):
                logprobs[row] = (value,)
        results = iter(zip(tokens, logprobs, strict=True))
        outputs = []
        for item in items:
            if item.sample is None:
                outputs.append(ItemOutput(()))
            else:
                token, logprob = next(results)
                outputs.append(ItemOutput((token,), logprob))
        return outputs

    def _score_inputs(self, items: list[BatchItem], hidden_NE: Tensor, outputs: list[ItemOutput]) -> None:
        row = 0
        for item, output in zip(items, outputs, strict=True):
            if item.input_logprobs_from is not None:
                output.input_logprobs = self._input_logprobs(item, hidden_NE, row)
            row += len(item.token_ids)

    def _input_logprobs(self, item: BatchItem, hidden_NE: Tensor, row: int) -> tuple[TokenLogprob, ...]:
        """Position p is scored by the row of token p - 1, so those of this step reach from start + 1 to
        start + len (the latter with `next_token`). Position 0 follows nothing and has no logprob."""
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
