"""The engine's own CPU time per step: with clients in its process, and in a process that has none.

    PYTHONPATH=. kedge serve null.yaml     # import_path: tests.cluster.null_app:build; STATE_DIR/counts says [0, 0, 0]
    chrt -f 50 python -m benchmarks.served.engine_beside_clients --counts STATE_DIR/counts --json record.json

Both run the real engine around the null runner, whose steps wait for 2 ms, with sessions of as many turns of the same
length. Clients leave gaps, so a step has fewer items than there are streams; the engine without clients then runs that
many streams. Rounds of the two alternate (A B A B); the medians count. The difference comes from what shares the
interpreter's lock and the caches: the event loop that sends out the turns' events.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from benchmarks.served.token_cost import run
from engine.api import Engine, GenerateRequest, SamplingParams, TokenDelta
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from tests.cluster.null_app import COUNTED_EVERY, STEP_S, null_engine

MODEL = Path("assets/models/kedge-chat")  # for its vocabulary's size; run from the repository root
PROMPT, TOKENS = 16, 64
STEPS = 20 * COUNTED_EVERY


@dataclass(frozen=True, slots=True)
class Cost:
    """What the engine's thread used between two readings of its counts."""

    steps: int
    items: int
    cpu_s: float

    @classmethod
    def since(cls, counts: Path, before: Sequence[float]) -> Cost:
        steps, items, cpu_s = (now - then for now, then in zip(read(counts), before, strict=True))
        return cls(int(steps), int(items), cpu_s)

    @property
    def items_a_step(self) -> float:
        return self.items / self.steps

    @property
    def us_a_step(self) -> float:
        return 1e6 * self.cpu_s / self.steps


def read(counts: Path) -> list[float]:
    found: list[float] = json.loads(counts.read_text())
    return found


class Stream:
    """One session after another, each of `turns` turns. Its history and chain are kept as a replica keeps them."""

    def __init__(self, engine: Engine, number: int, turns: int) -> None:
        self._engine = engine
        self._random = random.Random(number)
        self._turns = turns
        self._name = f"s{number}"
        self._begun = 0
        self._new: list[int] = []
        self._chain = engine.empty_chain("")

    @property
    def session_id(self) -> str:
        return f"{self._name}-{(self._begun - 1) // self._turns}"

    def begin(self) -> None:
        """Submits the next turn, whose request id is the stream's name and the turn's number."""
        if self._begun and self._begun % self._turns == 0:
            self._engine.close_session(self.session_id)
            self._chain = self._engine.empty_chain("")
        self._begun += 1
        self._new = [self._random.randrange(3, 900) for _ in range(PROMPT)]
        sampling = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            f"{self._name}:{self._begun}",
            self._new,
            sampling,
            history=self._chain.tokens,
            history_len=len(self._chain),
            history_chain=self._chain,
            session_id=self.session_id,
        )
        self._engine.submit(request)

    def took(self, output: Sequence[int]) -> None:
        """The turn has ended: it becomes history."""
        self._chain.extend(self._new)
        self._chain.extend(output)


class Turns:
    """Streams without clients: the end of one turn begins the next. A DeltaSink."""

    def __init__(self, counts: Path, streams: int, turns: int) -> None:
        self._deltas: queue.SimpleQueue[Sequence[TokenDelta]] = queue.SimpleQueue()
        cache = CacheSettings(16, num_pages=16_384, books="off")
        settings = EngineSettings(
            ModelSettings(str(MODEL)), cache, SchedulerSettings(max_running=256), SpeculationSettings()
        )
        self._counts = counts
        self._engine = null_engine(settings, self._deltas.put, lambda: False, STEP_S, counts)
        self._streams = {f"s{number}": Stream(self._engine, number, turns) for number in range(streams)}
        self._engine.start()

    def cost(self) -> Cost:
        """The cost of STEPS steps; nothing runs before and after."""
        for stream in self._streams.values():
            stream.begin()
        while read(self._counts)[0] == 0:
            time.sleep(STEP_S)
        before, running = read(self._counts), len(self._streams)
        outputs: dict[str, list[int]] = defaultdict(list)
        while running:
            for delta in self._deltas.get():
                outputs[delta.request_id] += delta.token_ids
                if delta.finish is None:
                    continue
                stream = self._streams[delta.request_id.partition(":")[0]]
                stream.took(outputs.pop(delta.request_id))
                if read(self._counts)[0] - before[0] < STEPS:
                    stream.begin()
                else:
                    running -= 1
        return Cost.since(self._counts, before)

    def stop(self) -> None:
        self._engine.stop(10.0)


def without_clients(streams: int, turns: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        counts.write_text("[0, 0, 0]")
        streaming = Turns(counts, streams, turns)
        try:
            return streaming.cost()
        finally:
            streaming.stop()


def beside_clients(url: str, counts: Path, streams: int, turns: int, seed: int) -> Cost:
    before = read(counts)
    run(url, streams, turns, TOKENS, seed)
    return Cost.since(counts, before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.turns * args.streams[0] < 4 * COUNTED_EVERY:
        sys.exit("too few turns for counts that are written every so many steps")
    run(args.url, args.streams[0], 1, TOKENS, args.rounds)  # the first calls connect
    costs: dict[int, list[tuple[Cost, Cost]]] = {streams: [] for streams in args.streams}
    for number in range(args.rounds):
        for streams in args.streams:
            beside = beside_clients(args.url, args.counts, streams, args.turns, number)
            costs[streams].append((beside, without_clients(round(beside.items_a_step), args.turns)))
    rows: list[dict[str, Any]] = [
        {
            "streams": streams,
            "items_a_step": statistics.median(beside.items_a_step for beside, _ in pairs),
            "us_a_step": statistics.median(beside.us_a_step for beside, _ in pairs),
            "us_a_step_without_clients": statistics.median(alone.us_a_step for _, alone in pairs),
            "ratio": statistics.median(beside.us_a_step / alone.us_a_step for beside, alone in pairs),
        }
        for streams, pairs in costs.items()
    ]
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console().print(table)
    settings = {name: getattr(args, name) for name in ("streams", "turns", "rounds")}
    save_record(args.json, settings=settings, rows=rows)


if __name__ == "__main__":
    main()
