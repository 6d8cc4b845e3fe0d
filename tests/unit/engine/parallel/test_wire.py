"""Batches over the wire: nothing is lost, and little travels."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.api import SamplingParams
from engine.batch import BatchItem, DraftWork, SampleSpec, ScheduledBatch, SeenTokens
from engine.parallel.messages import packed, unpacked
from engine.parallel.wire import BatchDecoder, BatchEncoder

PAGE_SIZE = 4
LOCAL_FIELDS = {"run", "pages", "window_pages", "sample"}
"""`run` is the scheduler's; tables are cut, and compared apart, as are samples."""


class Live:
    """A request as batches see it: its table grows, its pages are swapped now and then."""

    def __init__(self, name: str, rng: random.Random, windowed: bool) -> None:
        self.name, self._rng, self._windowed = name, rng, windowed
        self.length = 0
        self.table = np.array([rng.randrange(1000) for _ in range(40)], dtype=np.int32)
        self.window = self.table[::-1].copy()
        bias = MappingProxyType({3: 1.5}) if rng.random() < 0.3 else MappingProxyType({})
        self.params = SamplingParams(temperature=rng.random(), logit_bias=bias, stop_token_ids=frozenset({7}))
        self.seen = None
        if rng.random() < 0.4:
            self.seen = SeenTokens(np.array(rng.sample(range(100), 5)), [])

    def item(self) -> BatchItem:
        rng = self._rng
        tokens = [rng.randrange(100) for _ in range(rng.choice([1, 1, 1, 6]))]
        if self.length + 20 > 40 * PAGE_SIZE:
            self.length = 0
        if rng.random() < 0.1:
            self.table = self.table[::-1].copy()  # retracted, and back elsewhere
        if rng.random() < 0.2:
            self.window[: rng.randrange(5)] = -1
        spec = SampleSpec(self.params, self.seen)
        if rng.random() < 0.2:
            spec.logprobs, spec.top_logprobs = True, 3
        if rng.random() < 0.2:
            spec.allowed = rng.randbytes(13)
        item = BatchItem(self.name, tokens, self.length, self.table, rng.random() < 0.5, spec)
        item.window_pages = self.window if self._windowed else None
        match rng.randrange(6):
            case 0:
                item.sample, item.input_logprobs_from, item.next_token = None, self.length + 1, 5
            case 1 if len(tokens) > 1:
                item.num_drafts = 2
            case 2:
                item.draft = DraftWork(self.length, tokens, 2)
            case 3 if len(tokens) == 1:
                item.token_ids, item.pending_from = [-1], rng.randrange(3)
        self.length += len(tokens)
        if self.seen is not None:
            self.seen.output.append(tokens[-1])
        return item


def assert_same(got: ScheduledBatch, sent: ScheduledBatch) -> None:
    assert got.num_steps == sent.num_steps
    for ours, theirs in zip(got.items, sent.items, strict=True):
        for field in fields(BatchItem):
            if field.name not in LOCAL_FIELDS:
                assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
        assert_same_sample(ours.sample, theirs.sample)
        covered = -(-(theirs.start + theirs.num_tokens + sent.num_steps - 1) // PAGE_SIZE)
        assert ours.pages.tolist() == theirs.pages[:covered].tolist()
        if theirs.window_pages is None:
            assert ours.window_pages is None
        else:
            assert ours.window_pages is not None
            assert ours.window_pages.tolist() == theirs.window_pages[:covered].tolist()


def assert_same_sample(got: SampleSpec | None, sent: SampleSpec | None) -> None:
    if sent is None:
        assert got is None
        return
    assert got is not None
    assert replace(got, seen=None) == replace(sent, seen=None)
    assert (got.seen is None) == (sent.seen is None)
    if got.seen is not None and sent.seen is not None:
        assert got.seen.prompt.tolist() == sent.seen.prompt.tolist()
        assert got.seen.output == sent.seen.output


def test_batches_arrive_as_they_were_sent() -> None:
    """300 batches: requests come, go, come back under the same name, and stand in any order."""
    rng = random.Random(5)
    for windowed in (False, True):
        encoder, decoder = BatchEncoder(PAGE_SIZE), BatchDecoder()
        live = [Live(f"r{index}", rng, windowed) for index in range(8)]
        for _ in range(150):
            if rng.random() < 0.1:
                place = rng.randrange(len(live))
                live[place] = Live(live[place].name, rng, windowed)
            chosen = rng.sample(live, rng.randrange(1, 9))
            batch = ScheduledBatch([request.item() for request in chosen], rng.choice([1, 1, 4]))
            (wire,) = unpacked(packed(encoder.encode(batch)))
            assert_same(decoder.decode(wire), batch)


def test_a_decode_step_sends_no_tables_again() -> None:
    """64 requests of 8 k tokens: the first batch says where their pages are, later ones only what is new."""
    encoder = BatchEncoder(16)
    tables = [np.arange(600, dtype=np.int32) * 7 + index for index in range(64)]
    params = SamplingParams(temperature=0.0)

    def size(step: int) -> int:
        items: list[BatchItem] = []
        for index, table in enumerate(tables):
            spec: Any = SampleSpec(params)
            items.append(BatchItem(f"request-{index}", [5], 8192 + step, table, False, spec))
        return len(packed(encoder.encode(ScheduledBatch(items))))

    assert size(0) > 64 * 512 * 4
    assert all(size(step) < 64 * 60 for step in range(1, 40))
