"""Penalties for tokens that a sequence already has. They are kept up to date, so that a step adds only what is new.

Legend: V vocabulary, as wide as the logits, R rows of a step, M rows of these that have penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
        self.factor_V: Tensor | None = None
        self.off_V: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.factor_V = torch.ones(vocab_size, device=self._device)
            self.factor_V.index_fill_(0, prompt, params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            self.off_V = torch.zeros(vocab_size, device=self._device)

    @property
    def num_added(self) -> int:
        """Tokens of the output that are included."""
        return self._num_added

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the output. Costs their number."""
        add_to_all([(self, token_ids)], self._device)

    def count(self, token_ids: Sequence[int]) -> list[float]:
        """Counts the next tokens of the output. Returns what is subtracted for each from now on."""
        self._num_added += len(token_ids)
        self._counts.update(token_ids)
        per_token, once = self._params.frequency_penalty, self._params.presence_penalty
        return [per_token * self._counts[token_id] + once for token_id in token_ids]

    def write(self, ids_N: Tensor, off_N: Tensor) -> None:
        """Writes down the tokens that were counted, and what `count` returned for them."""
        if self.factor_V is not None:
            self.factor_V.index_fill_(0, ids_N, self._params.repetition_penalty)
        if self.off_V is not None:
            self.off_V.index_copy_(0, ids_N, off_N)

    def apply(self, logits_V: Tensor) -> Tensor:
        """A copy of the logits (float32) with the penalties. Costs a pass over the vocabulary, however many tokens
        there are."""
        return _edited(logits_V, self.factor_V, self.off_V)

    def copy(self) -> Penalties:
        """A copy to add tokens to that may be dropped."""
        other = Penalties.__new__(Penalties)
        other._params = self._params
        other._counts = self._counts.copy()
        other._num_added = self._num_added
        other._device = self._device
        other.factor_V = None if self.factor_V is None else self.factor_V.clone()
        other.off_V = None if self.off_V is None else self.off_V.clone()
        return other


class PenaltyTable:
    """A runner's penalties, by run. An entry lives as long as its run."""

    def __init__(self) -> None:
        self._by_run: WeakKeyDictionary[SeenTokens, Penalties] = WeakKeyDictionary()

    def of(self, spec: SampleSpec, logits_V: Tensor) -> Penalties | None:
        """The penalties for picks from such logits, after the tokens seen so far; None if there are none."""
        if spec.seen is None:
            return None
        (known,) = self._up_to_date([spec], logits_V)
        return known

    def apply(self, logits_RV: Tensor, specs: Mapping[int, SampleSpec]) -> None:
        """Edits some rows of the logits (float32) in place, as `Penalties.apply` would each of them, but with a few
        operations for all."""
        specs = {row: spec for row, spec in specs.items() if spec.seen is not None}
        if not specs:
            return
        known = self._up_to_date([*specs.values()], logits_RV[0])
        rows_M = send([*specs], torch.int64, logits_RV.device)
        factor_MV = _stacked([each.factor_V for each in known], 1.0)
        off_MV = _stacked([each.off_V for each in known], 0.0)
        logits_RV.index_copy_(0, rows_M, _edited(logits_RV[rows_M], factor_MV, off_MV))

    def _up_to_date(self, specs: Sequence[SampleSpec], logits_V: Tensor) -> list[Penalties]:
        """The penalties of each spec, all of which have seen tokens."""
        known: list[Penalties] = []
        news: list[tuple[Penalties, Sequence[int]]] = []
        for spec in specs:
            assert spec.seen is not None
            each = self._by_run.get(spec.seen)
            if each is None:
                prompt = send(spec.seen.prompt, torch.int64, logits_V.device)
                each = self._by_run[spec.seen] = Penalties(spec.params, prompt, len(logits_V))
            known.append(each)
            news.append((each, spec.seen.output[each.num_added :]))
        add_to_all(news, logits_V.device)
        return known


def add_to_all(news: Iterable[tuple[Penalties, Sequence[int]]], device: torch.device) -> None:
    """Adds to each its next tokens. They go to the device together."""
    news = [(penalties, token_ids) for penalties, token_ids in news if token_ids]
    if not news:
        return
    ids = [token_id for _, token_ids in news for token_id in token_ids]
    off = [amount for penalties, token_ids in news for amount in penalties.count(token_ids)]
    lens = [len(token_ids) for _, token_ids in news]
    ids_of = torch.split(send(ids, torch.int64, device), lens)
    off_of = torch.split(send(off, torch.float32, device), lens)
    for (penalties, _), ids_N, off_N in zip(news, ids_of, off_of, strict=True):
        penalties.write(ids_N, off_N)


def _stacked(rows: Sequence[Tensor | None], absent: float) -> Tensor | None:
    """The rows as one tensor [M, V], with `absent` in those that are None. None if all of them are."""
    some_V = next((row_V for row_V in rows if row_V is not None), None)
    if some_V is None:
        return None
    absent_V = torch.full_like(some_V, absent) if any(row_V is None for row_V in rows) else some_V
    return torch.stack([absent_V if row_V is None else row_V for row_V in rows])


def _edited(logits: Tensor, factor: Tensor | None, off: Tensor | None) -> Tensor:
    """A copy of logits with factors and amounts of the same shape."""
    edited = logits.clone()
    if factor is not None:
        # Each half is zero where the other is not; clamps keep NaN.
        edited.clamp_(min=0).div_(factor).add_(logits.clamp(max=0).mul_(factor))
    if off is not None:
        edited.sub_(off)
    return edited
