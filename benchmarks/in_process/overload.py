"""Sessions that hold five times the device's KV pool, against the same load over a pool ten times as large.

    python -m benchmarks.in_process.overload --seconds 600 --json overload.json

Both engines run in turn, A B A B, with 64 clients that always have a turn in flight. Afterwards a fresh engine
generates a sample of turns again, which must be the same token for token, and every page of every pool is audited.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.in_process.sessions_load import Clients, Load, Turn
from benchmarks.measure import OtherProcesses, save_record
from engine.api import GenerateRequest, SamplingParams
from engine.build import build_engine
from engine.engine import LocalEngine
from engine.settings import CacheSettings, EngineSettings, ModelSettings

EMBEDDED = "assets/models/kedge-chat"  # run from the repository root
VOCAB = 2048
PAGE_SIZE = 16
ROUNDS = 2
CLIENTS, SESSIONS = 64, 8
WAIT_S = 120.0
HOST_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Pool:
    name: str
    num_pages: int
    host_bytes: int


class Subject:
    """One engine under load. It runs round by round; the load goes on where it stopped."""

    def __init__(self, pool: Pool, load: Load) -> None:
        self.pool = pool
        self.clients = Clients(load)
        self.engine: LocalEngine = build_engine(settings(pool), self.clients)
        self.clients.start(self.engine)
        self.rounds: list[dict[str, float]] = []
        self._started = False

    def run(self, seconds: float) -> None:
        if not self._started:
            self.engine.start()
            self._started = True
            if not self.clients.filled.wait(10 * WAIT_S):
                raise SystemExit(f"{self.pool.name}: the sessions' first turns took too long")
        else:
            self.clients.stopping = False
            self.clients.idle.clear()
            self.clients.start(self.engine)
        before, others = self._counters(), OtherProcesses()
        time.sleep(seconds)
        after = self._counters()
        if not self.clients.stop(WAIT_S):
            raise SystemExit(f"{self.pool.name}: turns still run {WAIT_S} s after the last one began")
        figures = {
            name: (after[name] - before[name]) / (after["s"] - before["s"]) for name in after if name != "s"
        }
        self.rounds.append({**figures, "other_cores": others.cores() or 0.0})

    def _counters(self) -> dict[str, float]:
        stats = self.engine.stats()
        return {
            "s": time.perf_counter(),
            "tokens": self.clients.tokens,
            "turns": self.clients.turns,
            "prefill_tokens": stats.prefill_tokens,
            "to_host": stats.demotions_to_host,
            "to_log": stats.demotions_to_log,
            "promotions": stats.promotions_from_host + stats.promotions_from_disk,
            "retractions": stats.retractions,
        }


def settings(pool: Pool) -> EngineSettings:
    return EngineSettings(
        ModelSettings(EMBEDDED, num_threads=1),
        CacheSettings(PAGE_SIZE, pool.num_pages, host_size_bytes=pool.host_bytes),
    )


def check_sample(sample: list[Turn]) -> int:
    """How many sampled turns come out differently on a fresh engine, which has no state."""
    wrong = 0
    clients = Collector()
    engine = build_engine(settings(Pool("fresh", 4096, 0)), clients)
    for number, turn in enumerate(sample):
        prompt = turn.tokens[: -turn.num_output]
        sampling = SamplingParams(turn.num_output, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(str(number), prompt, sampling))
        while engine._scheduler.has_work or not engine._inbox.empty():
            engine._drain_inbox(block=False)
            engine.step()
        engine.flush()
        wrong += clients.output != turn.tokens[-turn.num_output :]
        clients.output = []
    return wrong


class Collector:
    def __init__(self) -> None:
        self.output: list[int] = []

    def __call__(self, deltas: Any) -> None:
        for delta in deltas:
            self.output += delta.token_ids


def finish(subject: Subject) -> dict[str, Any]:
    """Audits and stops a subject, checks its sample, and returns the closing figures."""
    report = subject.engine.audit().result(WAIT_S)
    held = subject.engine.session_kv_tokens().result(WAIT_S)
    for session_id in held:
        subject.engine.close_session(session_id).result(WAIT_S)
    subject.engine.flush().result(WAIT_S)
    empty = subject.engine.audit().result(WAIT_S)
    subject.engine.stop(WAIT_S)
    clients = subject.clients
    return {
        "pool": asdict(subject.pool),
        "rounds": subject.rounds,
        "tokens_per_s": statistics.median(one["tokens"] for one in subject.rounds),
        "turns": clients.turns,
        "turns_begun": clients.turns_begun,
        "errors": clients.errors[:5],
        "held_tokens": sum(held.values()),
        "held_times_pool": sum(len(t.history) for ts in clients.talks for t in ts)
        / (subject.pool.num_pages * PAGE_SIZE),
        "audit": str(report),
        "pages_left": {name: pool.total - pool.free for name, pool in empty.pools.items()},
        "sampled_turns": len(clients.sample),
        "sampled_wrong": check_sample(clients.sample),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="under overload, all rounds together")
    parser.add_argument("--pages", type=int, default=1024, help="pages of the overloaded pool")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # About half of max_len each: five times the pool in all.
    load = Load(CLIENTS, SESSIONS, 10 * args.pages * PAGE_SIZE // (CLIENTS * SESSIONS), 16, 8, VOCAB)
    pools = [
        Pool("sessions hold 0.5 x the pool", 10 * args.pages, 0),
        Pool("5 x, host tier", args.pages, HOST_BYTES),
        Pool("5 x, token log only", args.pages, 0),
    ]
    subjects = [Subject(pool, load) for pool in pools]
    for _ in range(ROUNDS):
        for subject in subjects:
            share = 1.0 if subject.pool.host_bytes else 0.25
            subject.run(share * args.seconds / ROUNDS)
    results = [finish(subject) for subject in subjects]
    first = results[0]["tokens_per_s"] or math.nan  # too short a round has no token
    table = Table(
        "load", "tokens/s", "of the first", "turns", "errors", "held / pool", "sampled, wrong", "audit", "pages left",
        title=f"{load.clients} clients, {load.clients * load.sessions_each} sessions, turns of 16 in + 8 out",
    )  # fmt: skip
    for result in results:
        table.add_row(
            result["pool"]["name"],
            f"{result['tokens_per_s']:,.0f}",
            f"{result['tokens_per_s'] / first:.2f}",
            f"{result['turns']:,} of {result['turns_begun']:,}",
            str(len(result["errors"])),
            f"{result['held_times_pool']:.2f}",
            f"{result['sampled_turns']}, {result['sampled_wrong']}",
            result["audit"],
            str(result["pages_left"]),
        )
    Console(width=160).print(table)
    save_record(args.json, load=asdict(load), results=results)


if __name__ == "__main__":
    main()
