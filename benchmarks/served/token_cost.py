"""CPU time of each kind of process per output token, for streams through HTTP.

    PYTHONPATH=. kedge serve null.yaml     # import_path: tests.cluster.null_app:build, whose steps compute nothing
    chrt -f 50 python -m benchmarks.served.token_cost --server-pid "$(pgrep -f 'kedge serve')" --json token_cost.json

Each of `--streams` sessions has a streamed turn at all times. The rounds go through the numbers of streams in turn (A B
A B); medians count. CPU time is what the kernel counts for the processes, so other work on the machine hardly affects
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from benchmarks.processes import cpu_seconds

LEAST_MS = 0.0005
"""Kinds of processes that use less per token are left out of the table."""


def run(url: str, streams: int, turns: int, tokens: int, seed: int) -> dict[str, Any]:
    """The summary of `kedge bench`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-c", "from serving.cli.main import main; main()", "bench", "--url", url]
        command += ["--sessions", str(streams), "--turns", str(turns), "--input-tokens", "16"]
        command += ["--output-tokens", str(tokens), "--warmup", "0", "--seed", str(seed), "--json", str(out)]
        command += ["--endpoint", "completions", "--prompt", "ids", "--allow-failed-turns"]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(out.read_text())["summary"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    costs: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in args.streams}
    rates: dict[int, list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for streams in args.streams:
            before = cpu_seconds(args.server_pid)
            summary = run(args.url, streams, args.turns, args.tokens, number)
            tokens = summary["output_tokens"]
            rates[streams].append(summary["output_tokens_per_s"])
            for role, used_s in cpu_seconds(args.server_pid).items():
                costs[streams][role].append(1e3 * (used_s - before.get(role, 0.0)) / tokens)
    rows = {
        str(streams): {role: statistics.median(each) for role, each in by_role.items()}
        for streams, by_role in costs.items()
    }
    table = Table("process, ms of CPU per token", *(f"{streams} streams" for streams in rows))
    for role in sorted({role for row in rows.values() for role in row}):
        values = [row.get(role, 0.0) for row in rows.values()]
        if max(values) >= LEAST_MS:
            table.add_row(role, *(f"{value:.4f}" for value in values))
    table.add_row("tokens/s", *(f"{statistics.median(rates[int(streams)]):.0f}" for streams in rows))
    Console().print(table)
    settings = {name: getattr(args, name) for name in ("streams", "turns", "tokens", "rounds")}
    medians = {streams: statistics.median(each) for streams, each in rates.items()}
    save_record(args.json, settings=settings, ms_per_token=rows, tokens_per_s=medians)


if __name__ == "__main__":
    main()
