"""Penalties for tokens that a sequence already has. They are kept up to date, so that a step adds only what is new.

Legend: V vocabulary, as wide as the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.api import SamplingParams
from engine.batch import SampleSpec, SeenTokens
from engine.device import send


class Penalties:
    """The penalties of one sequence. Each logit has a factor, the repetition penalty or 1, and an amount that is
    subtracted for how often the token was picked (frequency and presence penalties). What the parameters do not ask for
    is not kept."""

    def __init__(self, params: SamplingParams, prompt: Tensor, vocab_size: int) -> None:
        """`prompt` has the ids of the input's tokens, on the device of the logits."""
        self._params = params
        self._counts: Counter[int] = Counter()
        self._num_added = 0
        self._device = prompt.device
        self._factor_V: Tensor | None = None
        self._off_V: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._factor_V = torch.ones(vocab_size, device=self._device)
            self._factor_V.index_fill_(0, prompt, params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            self._off_V = torch.zeros(vocab_size, device=self._device)

    @property
    def num_added(self) -> int:
        """Tokens of the output that are included."""
        return self._num_added

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the output. Costs their number."""
        if not token_ids:
            return
        self._num_added += len(token_ids)
        self._counts.update(token_ids)
        ids = send(token_ids, torch.int64, self._device)
        if self._factor_V is not None:
            self._factor_V.index_fill_(0, ids, self._params.repetition_penalty)
        if self._off_V is not None:
            per_token, once = self._params.frequency_penalty, self._params.presence_penalty
            off = [per_token * self._counts[token_id] + once for token_id in token_ids]
            self._off_V.index_copy_(0, ids, send(off, torch.float32, self._device))

    def apply(self, logits_V: Tensor) -> Tensor:
        """A copy of the logits (float32) with the penalties. Costs a pass over the vocabulary, however many tokens
        there are."""
        edited_V = logits_V.clone()
        if self._factor_V is not None:
            # Each half is zero where the other is not; clamps keep NaN.
            edited_V.clamp_(min=0).div_(self._factor_V).add_(logits_V.clamp(max=0).mul_(self._factor_V))
        if self._off_V is not None:
            edited_V.sub_(self._off_V)
        return edited_V

    def copy(self) -> Penalties:
        """A copy to add tokens to that may be dropped."""
        other = Penalties.__new__(Penalties)
        other._params = self._params
        other._counts = self._counts.copy()
        other._num_added = self._num_added
        other._device = self._device
        other._factor_V = None if self._factor_V is None else self._factor_V.clone()
        other._off_V = None if self._off_V is None else self._off_V.clone()
        return other


class PenaltyTable:
    """A runner's penalties, by run. An entry lives as long as its run."""

    def __init__(self) -> None:
        self._by_run: WeakKeyDictionary[SeenTokens, Penalties] = WeakKeyDictionary()

    def of(self, spec: SampleSpec, logits_V: Tensor) -> Penalties | None:
        """The penalties for picks from such logits, after the tokens seen so far; None if there are none."""
        seen = spec.seen
        if seen is None:
            return None
        known = self._by_run.get(seen)
        if known is None:
            prompt = send(seen.prompt, torch.int64, logits_V.device)
            known = self._by_run[seen] = Penalties(spec.params, prompt, len(logits_V))
        known.add(seen.output[known.num_added :])
        return known
