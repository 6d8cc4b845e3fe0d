"""What a long history costs: a turn's bookkeeping, the check of the books, and the latency of a turn.

    python -m benchmarks.in_process.session_growth --json growth.json

Bookkeeping is the scheduler and the cache around a model that takes no time. The latency of 16 tokens in and 8 out on
eight sessions is taken in the first ten turns and after 150, with full attention and with a sliding window. Attention
over the whole history is the model's own work and grows; attention over a window does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import OtherProcesses, save_record
from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache
from cache.session_cache import SessionAwareCache
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.batch import ItemOutput, ModelOutput
from engine.build import build_engine
from engine.scheduler import Scheduler
from engine.settings import BooksCheck, CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.step_costs import StepCosts
from engine.stats import EngineCounters
from engine.stops import StopCriteria

EMBEDDED = Path("assets/models/kedge-chat")  # run from the repository root
PAGE_SIZE = 16
NEW_TOKENS, OUTPUT_TOKENS = 16, 8
SESSIONS = 8
TURNS = 150
BOOK_TURNS = 500
CHECKED_TURNS, CHECKED_STEPS = 40, 400
EDGE = 10
WINDOW = 128
LONG = 1_000_000
VOCAB_SIZE = 2_000
SHORT = 1_000
WAIT_S = 600.0


def bookkeeping_us(history_len: int, *, ngram: bool) -> float:
    """Median microseconds of one turn's scheduling and books on a history of `history_len` tokens."""
    cache = SessionAwareCache(PrefixCache(PageAllocator(2 * LONG // PAGE_SIZE), PAGE_SIZE))
    settings = SchedulerSettings(max_batch_tokens=2 * LONG, chunk_size=2 * LONG)
    stops = StopCriteria(frozenset(), 4 * LONG, VOCAB_SIZE)
    proposer = NgramProposer(3, 8, StepCosts(0.45, 0.15)) if ngram else None
    scheduler = Scheduler(cache, stops, settings, EngineCounters(), proposer)
    history: list[int] = []
    chain = cache.empty_chain("")
    times_s = []
    for number in range(BOOK_TURNS + 1):
        count = NEW_TOKENS if number else history_len
        new_tokens = np.random.default_rng(number).integers(0, VOCAB_SIZE, count).tolist()
        sampling = SamplingParams(OUTPUT_TOKENS, temperature=0.0)
        spec = GenerateRequest(
            str(number), new_tokens, sampling,
            history=history, history_len=len(history), history_chain=chain, session_id="s",
        )  # fmt: skip
        begun_s = time.perf_counter()
        output = run_turn(scheduler, spec)
        chain.extend(new_tokens + output)  # as the session book does at the commit
        times_s.append(time.perf_counter() - begun_s)
        history += new_tokens
        history += output
    return statistics.median(times_s[1:]) * 1e6


def run_turn(scheduler: Scheduler, spec: GenerateRequest) -> list[int]:
    scheduler.add(spec)
    output: list[int] = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        tokens = [ItemOutput((7 + len(output),) if item.sample else ()) for item in batch.items]
        for delta in scheduler.update(batch, ModelOutput(tokens)):
            output += delta.token_ids
    return output


class Sessions:
    """A DeltaSink that keeps SESSIONS sessions talking, all at once, for `turns` turns each."""

    def __init__(self, vocab_size: int, turns: int) -> None:
        self.vocab_size = vocab_size
        self.turns = turns
        self.engine: Any = None
        self.done = threading.Event()
        self.latency_s: list[list[float]] = [[] for _ in range(SESSIONS)]
        self.tokens = 0
        self._histories: list[list[int]] = [[] for _ in range(SESSIONS)]
        self._begun_s = [0.0] * SESSIONS
        self._output: list[list[int]] = [[] for _ in range(SESSIONS)]
        self._new: list[list[int]] = [[] for _ in range(SESSIONS)]

    def begin(self, number: int) -> None:
        rng = np.random.default_rng((number, len(self.latency_s[number])))
        history = self._histories[number]
        self._new[number] = rng.integers(3, self.vocab_size, NEW_TOKENS).tolist()
        self._output[number] = []
        self._begun_s[number] = time.perf_counter()
        self.engine.submit(
            GenerateRequest(
                f"{number}/{len(history)}",
                self._new[number],
                SamplingParams(OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
                history=history,
                history_len=len(history),
                session_id=str(number),
            )
        )

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            number = int(delta.request_id.split("/")[0])
            self._output[number] += delta.token_ids
            self.tokens += len(delta.token_ids)
            if delta.finish is None:
                continue
            self.latency_s[number].append(time.perf_counter() - self._begun_s[number])
            self._histories[number] += [*self._new[number], *self._output[number]]
            if len(self.latency_s[number]) < self.turns:
                self.begin(number)
        if all(len(times) == self.turns for times in self.latency_s):
            self.done.set()


def talk(model: ModelSettings, books: BooksCheck, turns: int) -> tuple[Sessions, float]:
    """All sessions' turns, and tokens per second."""
    sessions = Sessions(2000, turns)
    cache = CacheSettings(PAGE_SIZE, num_pages=4096, books=books)
    engine = build_engine(EngineSettings(model, cache), sessions)
    sessions.engine = engine
    for number in range(SESSIONS):
        sessions.begin(number)
    begun_s = time.perf_counter()
    engine.start()
    assert sessions.done.wait(WAIT_S)
    seconds = time.perf_counter() - begun_s
    engine.stop(WAIT_S)
    return sessions, sessions.tokens / seconds


def growth(model: ModelSettings) -> dict[str, float]:
    others = OtherProcesses()
    sessions, _ = talk(model, "balance", TURNS)
    # The very first turn fills pools and caches for the first time.
    first = statistics.median(seconds for times in sessions.latency_s for seconds in times[1:EDGE])
    last = statistics.median(seconds for times in sessions.latency_s for seconds in times[-EDGE:])
    return {
        "first_ms": first * 1e3, "last_ms": last * 1e3, "ratio": last / first, "other_cores": others.cores() or 0.0,
    }  # fmt: skip


def check_cost(model: ModelSettings, rounds: int) -> dict[str, Any]:
    """Tokens per second by level of the check, in turn; and the time of a single check beside that of a step."""
    rates: dict[BooksCheck, list[float]] = {"off": [], "balance": [], "strict": []}
    for _ in range(rounds):
        for level in rates:
            rates[level].append(talk(model, level, CHECKED_TURNS)[1])
    medians = {level: statistics.median(values) for level, values in rates.items()}
    ratios = {
        level: statistics.median(
            off / rate - 1.0 for off, rate in zip(rates["off"], rates[level], strict=True)
        )
        for level in rates
    }
    return {"tokens_per_s": medians, "cost": ratios, "rounds": rates, **single_check(model)}


def single_check(model: ModelSettings) -> dict[str, float]:
    sessions = Sessions(2000, 10**9)
    engine = build_engine(
        EngineSettings(model, CacheSettings(PAGE_SIZE, num_pages=4096, books="off")), sessions
    )
    sessions.engine = engine
    for number in range(SESSIONS):
        sessions.begin(number)
    steps_s, checks_s = [], []
    for _ in range(CHECKED_STEPS):
        engine._drain_inbox(block=False)
        begun_s = time.perf_counter()
        engine.step()
        stepped_s = time.perf_counter()
        engine._cache.books.check("balance")
        checks_s.append(time.perf_counter() - stepped_s)
        steps_s.append(stepped_s - begun_s)
    step_s, check_s = statistics.median(steps_s), statistics.median(checks_s)
    return {"step_us": step_s * 1e6, "check_us": check_s * 1e6, "check_share": check_s / step_s}


def windowed_model(directory: Path) -> ModelSettings:
    """The embedded model's shape with random weights and a sliding window in every layer."""
    config = json.loads((EMBEDDED / "config.json").read_text())
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    return ModelSettings(str(directory), load_format="dummy", num_threads=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    embedded = ModelSettings(str(EMBEDDED), num_threads=1)
    books = {}
    for name, ngram in (("no speculation", False), ("n-gram index", True)):
        short, long = bookkeeping_us(SHORT, ngram=ngram), bookkeeping_us(LONG, ngram=ngram)
        books[name] = {"short_us": short, "long_us": long, "ratio": long / short}
    with tempfile.TemporaryDirectory() as directory:
        latency = {
            "full attention": growth(embedded),
            f"window {WINDOW}": growth(windowed_model(Path(directory))),
        }
    checks = check_cost(embedded, args.rounds)
    console = Console(width=110)
    table = Table("a turn's bookkeeping", f"µs at {SHORT:,}", f"µs at {LONG:,} tokens", "ratio")
    for name, row in books.items():
        table.add_row(name, f"{row['short_us']:.0f}", f"{row['long_us']:.0f}", f"{row['ratio']:.2f}")
    console.print(table)
    table = Table(f"{SESSIONS} sessions, 16 + 8 tokens", "ms, turns 2-10", f"ms, turns {TURNS - EDGE + 1}-{TURNS}",
                  "ratio", "other cores")  # fmt: skip
    for name, row in latency.items():
        table.add_row(name, f"{row['first_ms']:.1f}", f"{row['last_ms']:.1f}", f"{row['ratio']:.2f}",
                      f"{row['other_cores']:.2f}")  # fmt: skip
    console.print(table)
    table = Table("check of the books", "tokens/s", "cost")
    for level, rate in checks["tokens_per_s"].items():
        table.add_row(level, f"{rate:,.0f}", f"{checks['cost'][level]:.1%}")
    console.print(table)
    console.print(
        f"one check of balances {checks['check_us']:.1f} µs, a step {checks['step_us']:,.0f} µs: "
        f"{checks['check_share']:.2%}"
    )
    save_record(args.json, bookkeeping=books, latency=latency, checks=checks)


if __name__ == "__main__":
    main()
