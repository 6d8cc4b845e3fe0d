"""Time to the first token for clients that send whole histories, beside a client that sends only what is new.

    python -m benchmarks.served.history_ttft --rounds 5 --json history_ttft.json

It serves the built-in model itself, with one replica. In each round each kind of client has a conversation of its own.
The clients alternate turn by turn, and each round begins with another of them (A B C, B C A), so other work on the
machine affects all of them. There are two shapes: a long first message followed by short turns, where the turn itself
costs little, and turns that are all alike. Once the server runs, the script gives itself real-time priority if it may;
`chrt` would give it to the server, too. The table has medians and the best, and the ratios of both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.served.conversing_clients import Speaker, Way, open_client
from serving.cli.load.machine import CpuMeter, CpuShares, describe_machine
from serving.cli.load.prompts import PromptSource
from serving.cli.load.punctuality import Punctuality
from serving.cli.load.sample import TurnSample
from serving.cli.load.server_processes import find_server_pids
from tests.cluster.served_cluster import ROOT, ServedCluster

VOCAB_SIZE = 4096
CLIENTS_PRIORITY = 50
EARLY, LATE = range(2, 5), range(18, 21)
LATE_MEDIAN, LATE_BEST = "late_ttft_ms", "best_late_ttft_ms"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a conversation: words of its first message and of each later one."""

    name: str
    first_words: int
    words: int


SHAPES = (Shape("long beginning", 4_700, 16), Shape("even turns", 250, 250))
TURNS, MAX_TOKENS = LATE.stop - 1, 16

Samples = dict[Way, list[list[TurnSample]]]
"""For each way, the turns of each round."""


def one_replica(document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["replicas"]["count"] = 1


async def converse(
    client: aiohttp.ClientSession, url: str, shape: Shape, seed: int
) -> dict[Way, list[TurnSample]]:
    """One round: a conversation of each way, all of them alternating turn by turn."""
    ways = list(Way)
    order = ways[seed % len(ways) :] + ways[: seed % len(ways)]
    speakers = {way: Speaker(client, url, way, number) for number, way in enumerate(ways)}
    prompts = PromptSource(seed, VOCAB_SIZE)
    samples: dict[Way, list[TurnSample]] = {way: [] for way in ways}
    for turn in range(1, TURNS + 1):
        for way in order:
            words = prompts.words(ways.index(way), turn, shape.words if turn > 1 else shape.first_words)
            samples[way].append(await speakers[way].say(words, MAX_TOKENS, ignore_eos=True))
    for speaker in speakers.values():
        await speaker.close()
    return samples


async def measure(url: str, shape: Shape, rounds: int) -> tuple[Samples, CpuShares | None, float]:
    """All samples, who used the processors, and how late the client's timers were (99th percentile)."""
    found: Samples = {way: [] for way in Way}
    async with open_client() as client:
        await converse(client, url, shape, rounds)  # warms everything up; no later round uses its seed
        gc.disable()
        meter = CpuMeter(find_server_pids(url))
        async with Punctuality() as punctuality:
            for number in range(rounds):
                for way, samples in (await converse(client, url, shape, number)).items():
                    found[way].append(samples)
        shares = meter.read()
        gc.enable()
    return found, shares, statistics.quantiles(punctuality.lateness_s, n=100)[-1]


def figures(rounds: Sequence[Sequence[TurnSample]]) -> dict[str, float]:
    """Figures of one way. `computed`: tokens of a late turn's prompt that had no KV."""
    late = [sample for samples in rounds for sample in samples if sample.turn in LATE]
    early = [sample for samples in rounds for sample in samples if sample.turn in EARLY]
    usages = [sample.usage for sample in late if sample.usage is not None]
    return {
        "early_ttft_ms": 1e3 * statistics.median(sample.ttft_s for sample in early),
        LATE_MEDIAN: 1e3 * statistics.median(sample.ttft_s for sample in late),
        LATE_BEST: 1e3 * min(sample.ttft_s for sample in late),
        "prompt_tokens": statistics.median(usage.prompt_tokens for usage in usages),
        "computed": statistics.median(usage.prompt_tokens - (usage.cached_tokens or 0) for usage in usages),
    }


def ratio(rows: Mapping[Way, Mapping[str, float]], way: Way, figure: str) -> float:
    return rows[way][figure] / rows[Way.SESSION][figure]


def take_priority() -> None:
    """Gives this process alone real-time priority: a client that waits for a processor measures its own delay."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(CLIENTS_PRIORITY))
    except (AttributeError, PermissionError):
        Console(stderr=True).print("no real-time priority: the client may measure itself")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if args.shape is None or shape.name in args.shape]
    table = Table("", "clients send", "prompt, tokens", "computed", "turns 2-4, ms", "turns 18-20 (best), ms",
                  "to a session's (best)", title="time to the first token; prompts of turns 18-20")  # fmt: skip
    records: list[dict[str, Any]] = []
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", one_replica)
    try:
        served.start()
        take_priority()
        for shape in shapes:
            samples, cpu, lateness_s = asyncio.run(measure(served.url, shape, args.rounds))
            rows = {way: figures(samples[way]) for way in Way}
            for way, row in rows.items():
                times = f"{row[LATE_MEDIAN]:.2f} ({row[LATE_BEST]:.2f})"
                ratios = f"{ratio(rows, way, LATE_MEDIAN):.3f} ({ratio(rows, way, LATE_BEST):.3f})"
                table.add_row(shape.name, way, f"{row['prompt_tokens']:,.0f}", f"{row['computed']:.0f}",
                              f"{row['early_ttft_ms']:.2f}", times, ratios)  # fmt: skip
            records.append({
                "shape": asdict(shape),
                "ways": {way: row | {"ratio": ratio(rows, way, LATE_MEDIAN)} for way, row in rows.items()},
                "cpu": None if cpu is None else asdict(cpu),
                "client_late_p99_ms": 1e3 * lateness_s,
                "late_ttft_ms": {
                    way: [[round(1e3 * each.ttft_s, 3) for each in turns if each.turn in LATE] for turns in rounds]
                    for way, rounds in samples.items()
                },
            })  # fmt: skip
    finally:
        served.stop()
    console = Console(width=150)
    console.print(table)
    for record in records:
        console.print(
            f"{record['shape']['name']}: {record['cpu']}, late {record['client_late_p99_ms']:.1f} ms"
        )
    if args.json is not None:
        settings = {"rounds": args.rounds, "turns": TURNS, "max_tokens": MAX_TOKENS}
        document = {"machine": describe_machine(), "settings": settings, "shapes": records}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
