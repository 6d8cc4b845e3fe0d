"""Takes the session log or the controller away for a while under streaming sessions. It shows whether a turn fails, is
lost or doubled, how soon all sessions continue, and whether any history is computed again.

    make serve CONFIG=with_redis.yaml       # controller.redis_url names a Redis on this machine
    python -m benchmarks.failures.outage --away redis --seconds 30 --json outage.json      # on the same machine

`--away redis` stops (SIGSTOP) the Redis of the log, `--away controller` the controller's actor;
`--away controller-dies` kills the actor again and again. Every turn is checked, in the ways that
benchmarks/failures/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.failures.session_talkers import Findings
from benchmarks.failures.streaming_talkers import StreamingTalker, longest_gap_s
from benchmarks.failures.talk_run import (
    check_ends,
    conclude,
    failures_line,
    open_client,
    talk_arguments,
    talking,
)
from benchmarks.processes import siblings

CONTROLLER = "ray::ClusterController"
KILL_AGAIN_S = 0.25
ON_THE_WAY_S = 1.0
"""A client may hear this much later of what was committed before."""


@asynccontextmanager
async def away(what: str, info: dict[str, Any]) -> AsyncIterator[None]:
    """Makes a part of the server with the given `info` stop answering. Raises SystemExit if it is not on this
    machine."""
    replica_pid = info["replicas"][0]["pid"]
    if what == "controller-dies":
        killing = asyncio.create_task(_kill_on(replica_pid))
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        return
    pids = siblings(replica_pid, CONTROLLER)
    if what == "redis":
        url = info["settings"]["controller"]["redis_url"]
        if url is None:
            raise SystemExit("the session log is not in Redis")
        with redis.Redis.from_url(url) as client:
            pids = [client.info("server")["process_id"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _kill_on(replica_pid: int) -> None:
    while True:
        for pid in siblings(replica_pid, CONTROLLER):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(KILL_AGAIN_S)


async def turns_moved(client: httpx.AsyncClient) -> float:
    """Calls that a busy replica passed on: the session moved, and its KV is computed again. The replica counts them,
    since it outlives the controller."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = chain.from_iterable(family.samples for family in families)
    return sum(
        sample.value
        for sample in samples
        if sample.name == "kedge_turns_total" and sample.labels["outcome"] == "moved"
    )


async def measure(args: argparse.Namespace) -> tuple[Findings, bool, dict[str, Any]]:
    """Returns what was found, whether the audit at the end is clean, and figures for the JSON record."""
    findings = Findings()
    async with open_client(args) as client:
        talkers = [
            StreamingTalker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)
        ]
        info = (await client.get("/get_server_info")).json()
        moved_before = await turns_moved(client)
        async with talking(talkers):
            await asyncio.sleep(args.before_s)
            async with away(args.away, info):
                began_s = time.monotonic()
                await asyncio.sleep(args.seconds)
            back_s = time.monotonic()
            await asyncio.sleep(args.after_s)
            over_s = time.monotonic()
        audit_clean = await check_ends(client, talkers)
        moved = await turns_moved(client) - moved_before
    turns = list(chain.from_iterable(talker.turns for talker in talkers))
    computed_again = [turn.computed_again for turn in turns if turn.asked_s > began_s and turn.computed_again]
    went_on_s = [next(at_s for at_s in talker.heard_s if at_s > back_s) - back_s for talker in talkers]
    silences_s = [longest_gap_s(talker.heard_s, back_s, over_s) for talker in talkers]
    figures = {
        "away_s": round(back_s - began_s, 2),
        "turns_before": sum(turn.ended_s < began_s for turn in turns),
        "turns_ended_during": sum(began_s + ON_THE_WAY_S < turn.ended_s < back_s for turn in turns),
        "went_on_after_s": [round(after_s, 3) for after_s in sorted(went_on_s)],
        "longest_silences_after_s": [round(silence_s, 3) for silence_s in sorted(silences_s)],
        "turns_that_computed_history_again": len(computed_again),
        "tokens_computed_again": sum(computed_again),
        "turns_moved_to_less_busy_replicas": moved,
    }
    return findings, audit_clean, figures


def show(findings: Findings, audit_clean: bool, figures: dict[str, Any]) -> None:
    table = Table("what", "figure")
    for name, value in {
        "away": f"{figures['away_s']:.1f} s",
        "turns, tokens": f"{findings.turns:,}, {findings.tokens:,}",
        "turns that ended while it was away": f"{figures['turns_ended_during']:,}",
        "attempts that failed": failures_line(findings),
        "from its return until a session hears something": median_and_last(figures["went_on_after_s"]),
        "a session's longest silence since then": median_and_last(figures["longest_silences_after_s"]),
        "turns that computed history again": f"{figures['turns_that_computed_history_again']:,}"
        f" ({figures['tokens_computed_again']:,} tokens)",
        "turns moved to a less busy replica, all the time": f"{figures['turns_moved_to_less_busy_replicas']:,.0f}",
        "turns found in the log": f"{findings.logged:,}",
        "turns whose answer is the model's": f"{findings.checked:,}",
        "lost, doubled or wrong": f"{len(findings.wrong):,}",
        "audit": "clean" if audit_clean else "not clean",
    }.items():
        table.add_row(name, value)
    Console().print(table)


def median_and_last(times_s: list[float]) -> str:
    return f"median {statistics.median(times_s):.2f} s, last {times_s[-1]:.2f} s"


def main() -> None:
    parser = talk_arguments(__doc__, sessions=12)
    parser.add_argument("--away", choices=("redis", "controller", "controller-dies"), default="redis")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is away")
    parser.add_argument("--before-s", type=float, default=10.0)
    parser.add_argument("--after-s", type=float, default=15.0)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, audit_clean, figures = asyncio.run(measure(args))
    show(findings, audit_clean, figures)
    conclude(args, findings, audit_clean, figures)


if __name__ == "__main__":
    main()
