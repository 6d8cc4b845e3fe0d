"""The engine's own CPU time per step: with clients in its process, and in a process that has none.

    PYTHONPATH=.:tests/cluster kedge serve null.yaml     # import_path: null_app:build; STATE_DIR/counts says [0, 0, 0]
    chrt -f 50 python benchmarks/engine_beside_clients.py --counts STATE_DIR/counts --json engine_beside_clients.json

Both run the real engine around the null runner, whose steps wait for 2 ms, with turns of the same length. Clients leave
gaps, so a step has fewer items than there are streams; the engine without clients then runs that many streams. Rounds
of the two alternate (A B A B); the medians count. The difference comes from what shares the interpreter's lock and the
caches: the event loop that sends out the turns' events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import machine
from null_app import COUNTED_EVERY, STEP_S, null_engine
from rich.console import Console
from rich.table import Table
from token_cost import run

from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculationSettings,
)

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


class Turns:
    """Streams of turns without clients: the end of one begins the next. A DeltaSink."""

    def __init__(self, counts: Path) -> None:
        self._ended: list[str] = []
        self._any = threading.Event()
        cache = CacheSettings(16, num_pages=16_384, books="off")
        settings = EngineSettings(
            ModelSettings(str(MODEL)), cache, SchedulerSettings(max_running=256), SpeculationSettings()
        )
        self._counts = counts
        self._engine = null_engine(settings, self, lambda: False, STEP_S, counts)
        self._engine.start()

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        ended = [delta.request_id for delta in deltas if delta.finish is not None]
        if ended:
            self._ended += ended
            self._any.set()

    def cost(self, streams: int) -> Cost:
        """The cost of STEPS steps; nothing runs before and after."""
        for number in range(streams):
            self._submit(number)
        while read(self._counts)[0] == 0:
            time.sleep(STEP_S)
        before, running, last = read(self._counts), streams, streams - 1
        while running:
            self._any.wait()
            self._any.clear()
            while self._ended:
                self._ended.pop()
                running -= 1
                if read(self._counts)[0] - before[0] < STEPS:
                    last, running = last + 1, running + 1
                    self._submit(last)
        return Cost.since(self._counts, before)

    def stop(self) -> None:
        self._engine.stop(10.0)

    def _submit(self, number: int) -> None:
        prompt = [3 + (number + n) % 900 for n in range(PROMPT)]
        sampling = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
        self._engine.submit(GenerateRequest(f"r{number}", prompt, sampling))


def without_clients(streams: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        counts.write_text("[0, 0, 0]")
        turns = Turns(counts)
        try:
            return turns.cost(streams)
        finally:
            turns.stop()


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
            costs[streams].append((beside, without_clients(round(beside.items_a_step))))
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
    if args.json is not None:
        settings = {name: getattr(args, name) for name in ("streams", "turns", "rounds")}
        record = {"machine": machine(), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
