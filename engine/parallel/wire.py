"""Batches as they go from rank 0 to the other ranks. Every rank must run the same step in the same way, so it gets the
whole batch, but without what the previous batch already said.

An item is identified by its place in the previous batch. For a run that was in it, only what is new is sent: tokens,
changed entries of its page tables, and what it has picked. So both ends must see every batch, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.sequence_kv import pages_for
from engine.api import SamplingParams
from engine.batch import BatchItem, DraftWork, SampleSpec, ScheduledBatch, SeenTokens

Wire = tuple[Any, ...]
"""Plain data: numbers, strings, bytes, tuples."""

_PARAMS = tuple(field.name for field in fields(SamplingParams))


@dataclass(slots=True)
class _Sent:
    """What the other ranks know of a run: the place of its item in the last batch, how that was to sample, how much of
    its output, and how many entries of its tables."""

    run: int
    place: int
    sample: SampleSpec | None
    num_output: int
    num_pages: int


class BatchEncoder:
    """Rank 0's end. Tables are cut to the pages that the step reads or writes."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._sent: dict[str, _Sent] = {}

    def encode(self, batch: ScheduledBatch) -> Wire:
        known, sent = self._sent, {}
        items = []
        extra_steps = batch.num_steps - 1
        for place, item in enumerate(batch.items):
            before = known.get(item.request_id)
            if before is not None and before.run != item.run:
                before = None
            num_pages = pages_for(item.start + item.num_tokens + extra_steps, self._page_size)
            items.append(_item(item, before, num_pages))
            seen = None if item.sample is None else item.sample.seen
            num_output = 0 if seen is None else len(seen.output)
            sent[item.request_id] = _Sent(item.run, place, item.sample, num_output, num_pages)
        self._sent = sent
        return batch.num_steps, tuple(items)


class BatchDecoder:
    """The other ranks' end."""

    def __init__(self) -> None:
        self._before: list[tuple[BatchItem, _Table, _Table]] = []

    def decode(self, wire: Wire) -> ScheduledBatch:
        num_steps, wired = wire
        self._before = [self._item(*parts) for parts in wired]
        return ScheduledBatch([item for item, _, _ in self._before], num_steps)

    def _item(
        self,
        name: int | tuple[str, int],
        token_ids: list[int],
        start: int,
        contiguous: bool,
        pages: Wire,
        window_pages: Wire | None,
        sample: Wire | None,
        num_drafts: int,
        pending_from: int | None,
        rarities: Wire | None,
    ) -> tuple[BatchItem, _Table, _Table]:
        if isinstance(name, int):
            before, table, window_table = self._before[name]
            request_id, run, before_sample = before.request_id, before.run, before.sample
        else:
            (request_id, run), before_sample, table, window_table = name, None, _Table(), _Table()
        item = BatchItem(
            request_id,
            token_ids,
            start,
            table.update(*pages),
            contiguous,
            None if sample is None else _read_sample(sample, before_sample),
            run,
            pending_from,
            num_drafts=num_drafts,
            known_pages=pages[0],
        )
        if window_pages is not None:
            item.window_pages, item.known_window_pages = window_table.update(*window_pages), window_pages[0]
        if rarities is not None:
            item.input_logprobs_from, item.next_token, item.top_input_logprobs, draft = rarities
            item.draft = None if draft is None else DraftWork(*draft)
        return item, table, window_table


class _Table:
    """A run's page table, kept from what was sent. An update overwrites the array that it returned for an earlier item;
    that is safe because steps run in order."""

    def __init__(self) -> None:
        self._entries = np.empty(0, dtype=np.int32)

    def update(self, first: int, changed: bytes) -> NDArray[np.int32]:
        """Replaces the entries from `first` on; those before stay."""
        entries = np.frombuffer(changed, dtype=np.int32)
        end = first + len(entries)
        if end > len(self._entries):
            grown = np.empty(max(end, 2 * len(self._entries)), dtype=np.int32)
            grown[:first] = self._entries[:first]
            self._entries = grown
        self._entries[first:end] = entries
        return self._entries[:end]


def _item(item: BatchItem, before: _Sent | None, num_pages: int) -> Wire:
    return (
        (item.request_id, item.run) if before is None else before.place,
        item.token_ids if isinstance(item.token_ids, list | tuple) else [int(t) for t in item.token_ids],
        item.start,
        item.contiguous,
        _changes(item.pages, item.known_pages, before, num_pages),
        None
        if item.window_pages is None
        else _changes(item.window_pages, item.known_window_pages, before, num_pages),
        None if item.sample is None else _sample(item.sample, before),
        item.num_drafts,
        item.pending_from,
        _rarities(item),
    )


def _changes(pages: NDArray[np.int32], num_known: int, before: _Sent | None, num_pages: int) -> Wire:
    """The index of the first entry that the other ranks do not know, and the entries from there on."""
    first = 0 if before is None else min(num_known, before.num_pages, num_pages)
    return first, pages[first:num_pages].tobytes()


def _sample(spec: SampleSpec, before: _Sent | None) -> Wire:
    """Leaves out what the last batch already said of this run."""
    if before is None or before.sample is None:
        return _params(spec.params), spec.logprobs, spec.top_logprobs, spec.allowed, _seen(spec.seen)
    seen = spec.seen
    new_output = None if seen is None else seen.output[before.num_output :]
    if before.sample is spec:
        return (new_output,)
    return None, spec.logprobs, spec.top_logprobs, spec.allowed, new_output


def _seen(seen: SeenTokens | None) -> Wire | None:
    return None if seen is None else (seen.prompt.tobytes(), [*seen.output])


def _read_sample(wired: Wire, before: SampleSpec | None) -> SampleSpec:
    """`seen` stays the same object for all items of a run, since the runner keeps what it derives from it."""
    if len(wired) > 1 and wired[0] is not None:
        params, logprobs, top_logprobs, allowed, seen = wired
        told = None if seen is None else SeenTokens(np.frombuffer(seen[0], dtype=np.int64), seen[1])
        return SampleSpec(_read_params(params), told, logprobs, top_logprobs, allowed)
    assert before is not None
    new_output = wired[-1]
    if before.seen is not None:
        before.seen.output.extend(new_output)
    if len(wired) == 1:
        return before
    _, logprobs, top_logprobs, allowed, _ = wired
    return SampleSpec(before.params, before.seen, logprobs, top_logprobs, allowed)


def _params(params: SamplingParams) -> Wire:
    values = {name: getattr(params, name) for name in _PARAMS}
    values["logit_bias"] = dict(params.logit_bias)
    values["stop_token_ids"] = tuple(params.stop_token_ids)
    return tuple(values[name] for name in _PARAMS)


def _read_params(wired: Wire) -> SamplingParams:
    values = dict(zip(_PARAMS, wired, strict=True))
    values["logit_bias"] = MappingProxyType(values["logit_bias"])
    values["stop_token_ids"] = frozenset(values["stop_token_ids"])
    return SamplingParams(**values)


def _rarities(item: BatchItem) -> Wire | None:
    if item.input_logprobs_from is None and item.draft is None:
        return None
    draft = item.draft
    work = None if draft is None else (draft.start, [int(token) for token in draft.token_ids], draft.count)
    return item.input_logprobs_from, item.next_token, item.top_input_logprobs, work
