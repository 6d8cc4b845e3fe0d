"""What watching costs: the shipped cluster with everything on, beside one with everything off, in the same run.

    python -m benchmarks.served.watching_cost --json watching_cost.json

On: each turn is traced and sent to a collector; each request has a line of JSON in the access log; Ray's metrics also
have the names of vLLM's boards; each replica audits itself every ten seconds; Prometheus scrapes every five; and a
client reads the console's stream. Both clusters run all the time and are measured in turn (A B A B), so other work on
the machine affects both. The collector and the clients that scrape and look are not part of the cluster's time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from benchmarks.processes import cpu_seconds
from benchmarks.served.token_cost import run
from serving.cli.load.server_processes import find_server_pids
from tests.cluster.served_cluster import ROOT, ServedCluster
from tests.unit.serving.otlp_collector import running_collector

SCRAPE_INTERVAL_S = 5.0
SESSIONS, TURNS, TOKENS = 8, 20, 16


@dataclass(frozen=True, slots=True)
class Round:
    cpu_ms_per_token: float
    tokens_per_s: float


def watched(document: dict[str, Any], endpoint: str, sample_ratio: float, access: str) -> None:
    document["applications"][0]["args"] |= {
        "tracing": {"endpoint": endpoint, "sample_ratio": sample_ratio},
        "logs": {"format": "json", "access": access},
        "metrics": {"ray_llm_names": "vllm", "audit_interval_s": 10.0},
    }


def unwatched(document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["metrics"] = {"audit_interval_s": None}


@contextmanager
def somebody_who_looks(cluster: ServedCluster) -> Iterator[None]:
    """A scrape now and then, and a reader of the console's stream."""
    over = threading.Event()

    def scrape() -> None:
        with cluster.client() as client:
            while not over.wait(SCRAPE_INTERVAL_S):
                client.get("/metrics").raise_for_status()

    def look() -> None:
        with cluster.client() as client, client.stream("GET", "/v1/kedge/watch") as stream:
            for _ in stream.iter_lines():
                if over.is_set():
                    return

    threads = [threading.Thread(target=each, daemon=True) for each in (scrape, look)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30.0)


def measure(cluster: ServedCluster, seed: int) -> Round:
    (pid,) = find_server_pids(cluster.url)[:1]
    before = sum(cpu_seconds(pid).values())
    summary = run(cluster.url, SESSIONS, TURNS, TOKENS, seed)
    used_s = sum(cpu_seconds(pid).values()) - before
    return Round(1e3 * used_s / summary["output_tokens"], summary["output_tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sample-ratio", type=float, default=1.0, help="of traces")
    parser.add_argument("--access", default="all", help="which requests have a line: off, errors, all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = ROOT / "configs" / "cluster.yaml"
    rounds: dict[str, list[Round]] = {"off": [], "on": []}
    with ExitStack() as stack:
        collector = stack.enter_context(running_collector())
        clusters = {
            "off": ServedCluster(config, unwatched),
            "on": ServedCluster(
                config,
                partial(
                    watched, endpoint=collector.endpoint, sample_ratio=args.sample_ratio, access=args.access
                ),
            ),
        }
        for cluster in clusters.values():
            stack.callback(cluster.stop)
            cluster.start()
        stack.enter_context(somebody_who_looks(clusters["on"]))
        for cluster in clusters.values():
            run(cluster.url, SESSIONS, TURNS, TOKENS, args.rounds)  # warms up
        for number in range(args.rounds):
            for name in sorted(clusters, reverse=number % 2 == 0):
                rounds[name].append(measure(clusters[name], number))
        num_spans = len(collector.spans)
    report(rounds, num_spans, args.json)


def report(rounds: dict[str, list[Round]], num_spans: int, file: Path | None) -> None:
    rows = {
        name: Round(
            statistics.median(each.cpu_ms_per_token for each in found),
            statistics.median(each.tokens_per_s for each in found),
        )
        for name, found in rounds.items()
    }
    table = Table("", "ms of CPU per token", "tokens/s", title=f"{num_spans:,} spans came")
    for name, row in rows.items():
        table.add_row(name, f"{row.cpu_ms_per_token:.3f}", f"{row.tokens_per_s:.0f}")
    cpu, rate = (
        rows["on"].cpu_ms_per_token / rows["off"].cpu_ms_per_token,
        rows["on"].tokens_per_s / rows["off"].tokens_per_s,
    )
    table.add_row("on to off", f"{cpu:.3f}", f"{rate:.3f}")
    Console().print(table)
    told = {name: [asdict(each) for each in found] for name, found in rounds.items()}
    save_record(file, spans=num_spans, cpu_ratio=cpu, rate_ratio=rate, rounds=told)


if __name__ == "__main__":
    main()
