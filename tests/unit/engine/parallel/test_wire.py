"""Batches over the wire: nothing is lost, and little is sent."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.batch import BatchItem, DraftWork, SampleSpec, ScheduledBatch, SeenTokens
from engine.parallel.protocol import packed, unpacked
from engine.parallel.wire import BatchDecoder, BatchEncoder
from tests.unit.operations import peak_bytes

PAGE_SIZE = 4
APART = {"pages", "window_pages", "known_pages", "known_window_pages", "sample"}
"""Fields that are compared separately: tables arrive shortened, and more of them may be sent than has changed."""

RUNS = count(1)


class Live:
    """A request whose batch items look real: its table grows, and its pages are replaced now and then."""

    def __init__(self, name: str, rng: random.Random, windowed: bool) -> None:
        self.name, self._rng, self._windowed = name, rng, windowed
        self.length = 0
        self.run, self.known, self.known_window = next(RUNS), 0, 0
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
            self.table = self.table[::-1].copy()  # as if it was retracted and came back on other pages
            self.run, self.known, self.known_window = next(RUNS), 0, 0
        if rng.random() < 0.2:
            first = rng.randrange(5)
            self.window[first : first + 2] = -1
            self.known_window = min(self.known_window, first)
        if rng.random() < 0.1:
            first = rng.randrange(40)
            self.table[first:] += 1
            self.known = min(self.known, first)
        spec = SampleSpec(self.params, self.seen)
        if rng.random() < 0.2:
            spec.logprobs, spec.top_logprobs = True, 3
        if rng.random() < 0.2:
            spec.allowed = rng.randbytes(13)
        item = BatchItem(self.name, tokens, self.length, self.table.copy(), rng.random() < 0.5, spec)
        item.window_pages = self.window.copy() if self._windowed else None
        item.run, item.known_pages, item.known_window_pages = self.run, self.known, self.known_window
        self.known = self.known_window = len(self.table)
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
            if field.name not in APART:
                assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
        assert ours.known_pages <= theirs.known_pages
        assert ours.known_window_pages <= theirs.known_window_pages
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
        known: dict[int, NDArray[np.int32]] = {}
        for _ in range(150):
            if rng.random() < 0.1:
                place = rng.randrange(len(live))
                live[place] = Live(live[place].name, rng, windowed)
            chosen = rng.sample(live, rng.randrange(1, 9))
            batch = ScheduledBatch([request.item() for request in chosen], rng.choice([1, 1, 4]))
            (wire,) = unpacked(packed(encoder.encode(batch)))
            decoded = decoder.decode(wire)
            assert_same(decoded, batch)
            for item in decoded.items:
                before = known.get(item.run, np.empty(0, dtype=np.int32))
                assert item.pages[: item.known_pages].tolist() == before[: item.known_pages].tolist()
                assert item.known_pages <= len(before)
                known[item.run] = item.pages.copy()


def test_a_decode_step_sends_no_tables_again() -> None:
    """64 requests of 8 k tokens. The first batch tells where their pages are, later batches only what is new."""
    encoder = BatchEncoder(16)
    tables = [np.arange(600, dtype=np.int32) * 7 + index for index in range(64)]
    params = SamplingParams(temperature=0.0)

    def size(step: int) -> int:
        items: list[BatchItem] = []
        for index, table in enumerate(tables):
            spec: Any = SampleSpec(params)
            known = len(table) if step else 0
            items.append(
                BatchItem(f"request-{index}", [5], 8192 + step, table, False, spec, known_pages=known)
            )
        return len(packed(encoder.encode(ScheduledBatch(items))))

    assert size(0) > 64 * 512 * 4
    assert all(size(step) < 64 * 60 for step in range(1, 40))


def test_a_decode_step_looks_at_no_table_again() -> None:
    """The cost is the same for a sequence of 1 k and of 100 k tokens, and for any number of tokens seen and picked."""

    def step(num_pages: int) -> int:
        encoder, seen = BatchEncoder(16), SeenTokens(np.arange(num_pages), [*range(num_pages)])
        spec = SampleSpec(SamplingParams(repetition_penalty=1.1), seen)
        table = np.arange(num_pages, dtype=np.int32)

        def batch(known_pages: int) -> ScheduledBatch:
            start = 16 * num_pages - 5
            return ScheduledBatch(
                [BatchItem("r", [5], start, table, False, spec, 1, known_pages=known_pages)]
            )

        encoder.encode(batch(0))
        seen.output.append(3)
        return peak_bytes(lambda: encoder.encode(batch(num_pages)))

    assert step(6000) <= step(60) + 500
