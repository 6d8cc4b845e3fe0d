"""Batches as they go from rank 0 to the others: whole, since every rank must run the same step in the same way, but
without what the batch before already said.

Items are told apart by their place in the batch before. Of an item that was in it only new tokens travel, and the end
of its page tables. Both ends therefore see every batch, in order.
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

TABLE_ITEM_BYTES = 4

_PARAMS = tuple(field.name for field in fields(SamplingParams))


@dataclass(slots=True)
class _Sent:
    """What the other ranks know of an item; `place` is where it stood in the last batch."""

    place: int
    params: SamplingParams | None
    seen: SeenTokens | None
    num_output: int
    pages: bytes
    window_pages: bytes | None


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
            wired, after = self._item(item, before, place, extra_steps)
            sent[item.request_id] = after
            items.append(wired)
        self._sent = sent
        return batch.num_steps, tuple(items)

    def _item(
        self, item: BatchItem, before: _Sent | None, place: int, extra_steps: int
    ) -> tuple[Wire, _Sent]:
        num_pages = pages_for(item.start + item.num_tokens + extra_steps, self._page_size)
        pages = item.pages[:num_pages].tobytes()
        window = None if item.window_pages is None else item.window_pages[:num_pages].tobytes()
        spec = item.sample
        params, seen, sample = None, None, None
        if spec is not None:
            params, seen = spec.params, spec.seen
            sample = _sample(spec, before)
        after = _Sent(place, params, seen, 0 if seen is None else len(seen.output), pages, window)
        wired = (
            item.request_id if before is None else before.place,
            item.token_ids if isinstance(item.token_ids, list | tuple) else [int(t) for t in item.token_ids],
            item.start,
            item.contiguous,
            _tail(pages, None if before is None else before.pages),
            None if window is None else _tail(window, None if before is None else before.window_pages),
            sample,
            item.num_drafts,
            item.pending_from,
            _rarities(item),
        )
        return wired, after


class BatchDecoder:
    """The other end."""

    def __init__(self) -> None:
        self._items: list[BatchItem] = []

    def decode(self, wire: Wire) -> ScheduledBatch:
        num_steps, wired = wire
        self._items = [self._item(*parts) for parts in wired]
        return ScheduledBatch(self._items, num_steps)

    def _item(
        self,
        name: str | int,
        token_ids: list[int],
        start: int,
        contiguous: bool,
        pages: Wire,
        window_pages: Wire | None,
        sample: Wire | None,
        num_drafts: int,
        pending_from: int | None,
        rarities: Wire | None,
    ) -> BatchItem:
        before = self._items[name] if isinstance(name, int) else None
        item = BatchItem(
            before.request_id if before is not None else str(name),
            token_ids,
            start,
            _joined(pages, None if before is None else before.pages),
            contiguous,
            None if sample is None else _spec(sample, None if before is None else before.sample),
            num_drafts=num_drafts,
            pending_from=pending_from,
        )
        if window_pages is not None:
            item.window_pages = _joined(window_pages, None if before is None else before.window_pages)
        if rarities is not None:
            item.input_logprobs_from, item.next_token, item.top_input_logprobs, draft = rarities
            item.draft = None if draft is None else DraftWork(*draft)
        return item


def _tail(table: bytes, before: bytes | None) -> Wire:
    """How many bytes stay of the table before, and those that follow."""
    kept = 0
    if before is not None:
        if table == before:
            return (-1, b"")
        if table.startswith(before):
            kept = len(before)
    return kept, table[kept:]


def _joined(tail: Wire, before: NDArray[np.int32] | None) -> NDArray[np.int32]:
    kept, added = tail
    if kept < 0:
        assert before is not None
        return before
    table = np.frombuffer(added, dtype=np.int32)
    if not kept:
        return table
    assert before is not None
    return np.concatenate([before[: kept // TABLE_ITEM_BYTES], table])


def _sample(spec: SampleSpec, before: _Sent | None) -> Wire:
    """Parameters that the last batch had need not be said again, nor tokens seen by then: they are the run's."""
    same = before is not None and before.params is spec.params
    params = None if same else _params(spec.params)
    return params, spec.logprobs, spec.top_logprobs, _seen(spec.seen, before), spec.allowed


def _seen(seen: SeenTokens | None, before: _Sent | None) -> Wire | None:
    if seen is None:
        return None
    if before is not None and before.seen is seen:
        return None, seen.output[before.num_output :]
    return seen.prompt.tobytes(), seen.output


def _params(params: SamplingParams) -> Wire:
    values = {name: getattr(params, name) for name in _PARAMS}
    values["logit_bias"] = dict(params.logit_bias)
    values["stop_token_ids"] = tuple(params.stop_token_ids)
    return tuple(values[name] for name in _PARAMS)


def _spec(wired: Wire, before: SampleSpec | None) -> SampleSpec:
    params, logprobs, top_logprobs, seen, allowed = wired
    if params is None:
        assert before is not None
        known = before.params
    else:
        values = dict(zip(_PARAMS, params, strict=True))
        values["logit_bias"] = MappingProxyType(values["logit_bias"])
        values["stop_token_ids"] = frozenset(values["stop_token_ids"])
        known = SamplingParams(**values)
    return SampleSpec(known, _told(seen, before), logprobs, top_logprobs, allowed)


def _told(wired: Wire | None, before: SampleSpec | None) -> SeenTokens | None:
    """Of one run it is one object here, too: the runner keeps what it made of it."""
    if wired is None:
        return None
    prompt, output = wired
    if prompt is not None:
        return SeenTokens(np.frombuffer(prompt, dtype=np.int64), list(output))
    assert before is not None
    assert before.seen is not None
    before.seen.output.extend(output)
    return before.seen


def _rarities(item: BatchItem) -> Wire | None:
    if item.input_logprobs_from is None and item.draft is None:
        return None
    draft = item.draft
    work = None if draft is None else (draft.start, [int(token) for token in draft.token_ids], draft.count)
    return item.input_logprobs_from, item.next_token, item.top_input_logprobs, work
