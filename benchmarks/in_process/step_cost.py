"""What a step costs beside the model: the engine's own work by number of streams, and costs that must not grow.

    python -m benchmarks.in_process.step_cost --json step_cost.json

It measures CPU time of the thread, so that a busy machine does not spoil it; medians of rounds in which all cases
alternate. The runner of the first table always returns the same token, and its time is subtracted. The second column
uses the null runner and includes its own work.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from cache.history import History
from cache.journal import Holder
from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache, token_array
from cache.sequence_kv import PageAccount, SequenceKV
from cache.session_cache import SessionAwareCache
from cache.tiers import TierSizes
from cache.token_chain import ANY_KV
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.assembly import assemble_engine
from engine.batch import BatchItem, ItemOutput, ModelOutput, SampleSpec, ScheduledBatch, SeenTokens
from engine.copies import Copies
from engine.engine import LocalEngine
from engine.request import LiveRequest
from engine.runner.penalties import PenaltyTable
from engine.runner.protocol import Done, RunnerFacts
from engine.runner.sampler import edit_logits
from engine.runner.step_buffers import StepBuffers, StepShape
from engine.scheduler import Scheduler
from engine.settings import CacheSettings, SchedulerSettings, SpeculationSettings
from engine.stats import EngineCounters
from engine.stops import StopCriteria
from tests.unit.engine.null_runner import NullRunner

PAGE_SIZE = 16
PROMPT, NEW_TOKENS = 64, 1_500
PAGES_EACH = 120
STREAMS = (8, 64, 256)
STEPS = 32
VOCAB = 151_936
GREEDY = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)


class ConstantRunner:
    """A Runner with only what decoding needs. `spent_s` is its own CPU time."""

    def __init__(self, num_pages: int) -> None:
        self.facts = RunnerFacts(num_pages, PAGE_SIZE, 64, 32_000, 10**6)
        self.spent_s = 0.0

    def launch(self, batch: ScheduledBatch) -> Done:
        begun_s = time.thread_time()
        output = ModelOutput([ItemOutput((7,) if item.sample is not None else ()) for item in batch.items])
        self.spent_s += time.thread_time() - begun_s
        return Done(output)

    def describe(self) -> dict[str, str | int | float | bool]:
        return {}


class Sink:
    """Counts tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.tokens += len(delta.token_ids)


def decoding(streams: int, runner: Any, sink: Sink) -> LocalEngine:
    """An engine whose sessions all decode; the caller runs its steps."""
    scheduler = SchedulerSettings(8192, 512, 512, 4096)
    engine = assemble_engine(
        runner, CacheSettings(PAGE_SIZE), scheduler, SpeculationSettings(), frozenset({2}), sink
    )
    for index in range(streams):
        prompt = [3 + (index + n) % 900 for n in range(PROMPT)]
        engine.submit(GenerateRequest(f"r{index}", prompt, GREEDY, session_id=f"s{index}"))
    engine._drain_inbox(block=False)
    while engine.stats().running < streams:
        engine.step()
        engine._stats.publish(now=True)
    for _ in range(4):  # the last prompts
        engine.step()
    return engine


class Steps:
    """Runs STEPS steps of one engine at a time; gives microseconds of CPU time a token."""

    def __init__(self, streams: int, *, null: bool) -> None:
        num_pages = streams * PAGES_EACH
        self._streams = streams
        self._runner = NullRunner(num_pages, PAGE_SIZE, 32_000, 10**6, poison=False) if null else None
        self._constant = ConstantRunner(num_pages)
        self._sink = Sink()
        self._engine = decoding(streams, self._runner or self._constant, self._sink)

    def us_a_token(self) -> float:
        self._constant.spent_s, self._sink.tokens = 0.0, 0
        begun_s = time.thread_time()
        for _ in range(STEPS):
            self._engine.step()
            self._engine._stats.publish(now=False)
        spent_s = time.thread_time() - begun_s - self._constant.spent_s
        assert self._sink.tokens == STEPS * self._streams
        return spent_s / self._sink.tokens * 1e6


def by_streams(rounds: int) -> list[dict[str, float]]:
    cases = {(streams, null): Steps(streams, null=null) for streams in STREAMS for null in (False, True)}
    times: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, steps in cases.items():
            times[case].append(steps.us_a_token())
    return [
        {
            "streams": streams,
            "us_a_token": statistics.median(times[streams, False]),
            "best_us_a_token": min(times[streams, False]),
            "ms_a_step": statistics.median(times[streams, False]) * streams / 1e3,
            "null_ms_a_step": statistics.median(times[streams, True]) * streams / 1e3,
        }
        for streams in STREAMS
    ]


def a_page(num_pages: int) -> Callable[[], object]:
    """Takes and returns one page of a pool. Two thirds of it are in use; the free pages are scattered."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages)
    for page in range(0, num_pages, 3):
        allocator.free(np.array([page], dtype=np.int32))

    def call() -> None:
        pages = allocator.allocate(1)
        assert pages is not None
        allocator.free(pages)

    return call


def a_penalized_row(num_tokens: int) -> Callable[[], object]:
    """Edits one row of logits after `num_tokens` distinct tokens and one more."""
    params = SamplingParams(repetition_penalty=1.1)
    table, logits_V = PenaltyTable(), torch.randn(VOCAB)
    seen = SeenTokens(np.array(random.Random(1).sample(range(VOCAB), num_tokens)), [])
    spec = SampleSpec(params, seen)

    def call() -> None:
        seen.output.append(5)
        edit_logits(logits_V, params, table.of(spec, logits_V))

    return call


def a_penalized_turn(history_len: int) -> Callable[[], object]:
    """What penalties need at the beginning of a session's turn whose history has KV."""
    draw = random.Random(2)
    history = [draw.randrange(VOCAB) for _ in range(history_len)]
    params = SamplingParams(repetition_penalty=1.1)
    spec = GenerateRequest("r", [1], params, history=history, history_len=history_len, session_id="s")
    kv = SequenceKV(ANY_KV.chain("", PAGE_SIZE), PageAccount())
    kv.chain.extend(history[:-1])

    def call() -> None:
        request = LiveRequest(spec, 0)
        request.kv = kv
        request.begin_run(1)

    call()
    return call


def filled_tables(num_pages: int) -> Callable[[], object]:
    """Lays out a decode of 64 sequences of `num_pages` pages for a GPU. What the card does itself is done here, too."""
    buffers = StepBuffers(256, 64, 64, num_pages + 2, 1, 1, PAGE_SIZE, torch.device("cpu"))
    table = np.arange(num_pages, dtype=np.int32)
    start = num_pages * PAGE_SIZE - 2
    items = [BatchItem(f"r{i}", [1], start, table, True, SampleSpec(GREEDY), 1 + i) for i in range(64)]
    batch, shape = ScheduledBatch(items), StepShape(64, 64, decode=True)
    buffers.fill(batch, shape, 64, [])
    for item in items:
        item.known_pages = num_pages
    return lambda: buffers.fill(batch, shape, 64, [])


def a_queue(num_waiting: int) -> Callable[[], object]:
    """A step of a running request while `num_waiting` others wait for a copy of idle sessions' KV to the host."""
    num_pages, pages_each = 26_985, 60  # of which 19 are left
    runner = NullRunner(num_pages, PAGE_SIZE, 1000, 200_000, poison=False, copies_wait=True)
    cache = SessionAwareCache(PrefixCache(PageAllocator(num_pages), PAGE_SIZE), TierSizes(10**9, 0, 64), 512)
    settings = SchedulerSettings(8192, 512, 256, 4096)
    stops = StopCriteria(frozenset(), 200_000, 1000)
    scheduler = Scheduler(cache, stops, settings, EngineCounters())
    copies = Copies(cache.tiers, runner, lambda command: command())

    def step() -> None:
        batch = scheduler.schedule()
        copies.carry_out()
        assert batch is not None
        tokens = [ItemOutput((7,) if item.sample is not None else ()) for item in batch.items]
        scheduler.update(batch, ModelOutput(tokens))

    scheduler.add(GenerateRequest("runs", [5] * 400, GREEDY))
    step()
    for index in range(num_pages // pages_each - 1):
        match = cache.match_prefix(f"s{index}", "", lambda: token_array([]), 0, History((), 0))
        kv = cache.begin(match, Holder(f"s{index}", "r"))
        cache.extend(kv, pages_each * PAGE_SIZE)
        kv.commit(pages_each * PAGE_SIZE, None)
        cache.finish_turn(f"s{index}", kv, np.zeros(kv.committed_len, dtype=np.int32))
    for index in range(num_waiting):
        prompt = [(index * 7 + n) % 900 for n in range(800)]
        scheduler.add(GenerateRequest(f"w{index}", prompt, SamplingParams(50)))
    for _ in range(3):
        step()
    assert scheduler.num_waiting
    assert cache.awaits_copies
    return step


GROWTH: dict[str, tuple[Callable[[int], Callable[[], object]], int, int]] = {
    "a page of a pool of so many, to take and to give back": (a_page, 4_096, 400_000),
    "a row of logits penalized for so many tokens": (a_penalized_row, 100, 30_000),
    "a turn with penalties begins on so many tokens": (a_penalized_turn, 1_000, 1_000_000),
    "64 decodes of so many pages laid out for a GPU": (filled_tables, 64, 8_192),
    "a step beside so many that wait for a copy": (a_queue, 50, 800),
}


def growth(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, (make, small, large) in GROWTH.items():
        calls = {size: make(size) for size in (small, large)}
        times: dict[int, list[float]] = {size: [] for size in calls}
        for _ in range(rounds):
            for size, call in calls.items():
                times[size].append(_cpu_us(call, 20))
        medians = {size: statistics.median(values) for size, values in times.items()}
        rows.append(
            {
                "what": name, "small": small, "large": large, "small_us": medians[small], "large_us": medians[large],
                "ratio": medians[large] / medians[small],
            }
        )  # fmt: skip
    return rows


def _cpu_us(call: Callable[[], object], count: int) -> float:
    begun_s = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - begun_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    streams, grown = by_streams(args.rounds), growth(args.rounds)
    console = Console(width=130)
    table = Table("streams", "µs a token", "best round", "ms a step", "ms a step with the null runner")
    for row in streams:
        table.add_row(
            str(row["streams"]), f"{row['us_a_token']:.2f}", f"{row['best_us_a_token']:.2f}", f"{row['ms_a_step']:.3f}",
            f"{row['null_ms_a_step']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table("what", "size", "µs", "size ", "µs ", "ratio")
    for each in grown:
        table.add_row(
            each["what"], f"{each['small']:,}", f"{each['small_us']:.1f}", f"{each['large']:,}",
            f"{each['large_us']:.1f}", f"{each['ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    save_record(args.json, rounds=args.rounds, streams=streams, growth=grown)


if __name__ == "__main__":
    main()
