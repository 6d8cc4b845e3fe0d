"""Changes a running cluster under streaming sessions: a rolling update, fewer replicas, more replicas, a drain by hand,
and the drain of a node. It shows whether a turn fails, how long turns wait for a first token, and whether throughput
ever stops.

    make serve CONFIG=my.yaml
    python -m benchmarks.failures.planned_changes --config my.yaml --rounds 3 --json planned_changes.json

A node is drained only if `--ray-address` names the cluster. The replicas must be on other nodes than the head. A new
node is started before one of theirs is drained. This is not measured: if nodes are machines, it takes nothing from the
nodes that serve.

The changes go to Ray Serve as `serve deploy` sends them. A turn's wait is its time to the first token less the time of
its own prefill: what an idle server, measured at the beginning, takes for the tokens that had no KV. So the wait
includes the KV that others compute meanwhile, and the slowdown of a busy machine. Every turn is checked, in the ways
that benchmarks/failures/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.failures.ray_dashboard import open_dashboard
from benchmarks.failures.ray_nodes import RayNodes
from benchmarks.failures.session_talkers import Findings
from benchmarks.failures.streaming_talkers import PrefillTime, StreamedTurn, StreamingTalker, longest_gap_s
from benchmarks.failures.talk_run import (
    check_ends,
    conclude,
    failures_line,
    open_client,
    talk_arguments,
    talking,
)

SETTLED_S = 180.0
LATE_S = 1.0
MOST_WORST = 5
NODE_CPUS = 2
COUNTED = ("turns", "waits_late", "tokens_computed_again")


class Deployment:
    """The served application: its config file, and the changes made to it."""

    def __init__(self, client: httpx.AsyncClient, dashboard: httpx.AsyncClient, config: Path) -> None:
        self._client = client
        self._dashboard = dashboard
        self._document = yaml.safe_load(config.read_text())

    async def change(self, section: str, **values: Any) -> None:
        self._document["applications"][0]["args"].setdefault(section, {}).update(values)
        await self._deploy()

    async def scale(self, count: int) -> None:
        """Uses Serve's own override, since a change in `args` replaces every replica."""
        override = [{"name": "LLMReplica", "num_replicas": count}]
        self._document["applications"][0]["deployments"] = override
        await self._deploy()

    async def settled(self, count: int, gone: set[str]) -> None:
        """Waits until `count` replicas answer, none of which is in `gone`."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                names = await self.replicas()
                if len(names) == count and not names & gone:
                    return
                await asyncio.sleep(0.2)

    async def replicas(self) -> set[str]:
        reply = await self._client.get("/get_server_info")
        return {replica["replica_id"] for replica in reply.json()["replicas"]}

    async def drain(self, replica_id: str) -> None:
        (await self._client.post(f"/v1/kedge/replicas/{replica_id}/drain")).raise_for_status()

    async def _deploy(self) -> None:
        reply = await self._dashboard.put("/api/serve/applications/", json=self._document)
        reply.raise_for_status()


@dataclass(frozen=True)
class Change:
    """`carry_out` returns once the change is done; `prepare`, if given, comes before it."""

    carry_out: Callable[[], Awaitable[None]]
    prepare: Callable[[], Awaitable[None]] | None = None


def changes_of(deployment: Deployment, count: int, nodes: RayNodes | None) -> dict[str, Change]:
    """The changes by name."""

    async def update() -> None:
        before = await deployment.replicas()
        await deployment.change("cache", size_mib=random.randrange(100, 200), num_pages=None)
        await deployment.settled(count, before)

    async def scale(to: int) -> None:
        await deployment.scale(to)
        await deployment.settled(to, set())

    async def drain() -> None:
        victim = min(await deployment.replicas())
        await deployment.drain(victim)
        await deployment.settled(count, {victim})

    async def drain_node(nodes: RayNodes) -> None:
        victim, node_id = await nodes.replica_to_drain()
        await nodes.drain(node_id)
        await deployment.settled(count, {victim})

    changes = {
        "rolling update": Change(update),
        f"{count} to 1": Change(lambda: scale(1)),
        f"1 to {count}": Change(lambda: scale(count)),
        "kedge drain": Change(drain),
    }
    if nodes is not None:
        changes["node drain"] = Change(lambda: drain_node(nodes), lambda: nodes.add(NODE_CPUS))
    return changes


async def measure(args: argparse.Namespace) -> tuple[Findings, bool, dict[str, Any]]:
    """Returns what was found, whether the audit at the end is clean, and figures for the JSON record."""
    findings, rounds = Findings(), list[dict[str, Any]]()
    async with open_client(args) as client, open_dashboard(args.dashboard) as dashboard:
        prefill = await PrefillTime.measured(client)
        talkers = [
            StreamingTalker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)
        ]
        deployment = Deployment(client, dashboard, args.config)
        nodes = RayNodes(dashboard, args.ray_address) if args.ray_address else None
        changes = changes_of(deployment, len(await deployment.replicas()), nodes)
        async with talking(talkers):
            await asyncio.sleep(args.pause_s)
            for number in range(args.rounds):
                for name in args.changes or changes:
                    if prepare := changes[name].prepare:
                        await prepare()
                        await asyncio.sleep(args.pause_s)
                    began_s = time.monotonic()
                    await changes[name].carry_out()
                    ended_s = time.monotonic()
                    await asyncio.sleep(args.pause_s)
                    span = span_figures(talkers, prefill, began_s, ended_s)
                    rounds.append({"change": name, "round": number, **span})
        audit_clean = await check_ends(client, talkers)
    figures = {
        "prefill_s": dict(zip(prefill.lengths, prefill.times_s, strict=True)),
        "changes": {name: over_rounds(rounds, name) for name in args.changes or changes},
        "rounds": rounds,
    }
    return findings, audit_clean, figures


def span_figures(
    talkers: list[StreamingTalker], prefill: PrefillTime, began_s: float, ended_s: float
) -> dict[str, Any]:
    """Figures of the turns that were asked for while a change was carried out and have had their first token, and of
    everything heard meanwhile."""
    turns = [
        turn
        for talker in talkers
        for turn in talker.turns
        if began_s <= turn.asked_s <= ended_s and turn.first_s
    ]
    waits_s = [turn.first_token_s - prefill.of(turn) for turn in turns]
    heard_s = chain.from_iterable(talker.heard_s for talker in talkers)
    ends_s = (turn.ended_s for talker in talkers for turn in talker.turns)
    return {
        "took_s": round(ended_s - began_s, 1),
        "turns": len(turns),
        "wait_median_s": round(statistics.median(waits_s), 3) if waits_s else 0.0,
        "wait_worst_s": round(max(waits_s, default=0.0), 3),
        "waits_late": sum(wait_s > LATE_S for wait_s in waits_s),
        "first_token_worst_s": round(max((turn.first_token_s for turn in turns), default=0.0), 3),
        "own_prefill_worst_s": round(max(map(prefill.of, turns), default=0.0), 3),
        "tokens_computed_again": sum(turn.computed_again for turn in turns),
        "longest_without_a_token_s": round(longest_gap_s(heard_s, began_s, ended_s), 3),
        "longest_without_an_end_s": round(longest_gap_s(ends_s, began_s, ended_s), 3),
        "worst_turns": [turn_figures(turn, prefill, began_s) for turn in worst_of(turns, prefill)],
    }


def worst_of(turns: list[StreamedTurn], prefill: PrefillTime) -> list[StreamedTurn]:
    by_wait = sorted(turns, key=lambda turn: turn.first_token_s - prefill.of(turn), reverse=True)
    return by_wait[:MOST_WORST]


def turn_figures(turn: StreamedTurn, prefill: PrefillTime, began_s: float) -> dict[str, float]:
    return {
        "asked_after_s": round(turn.asked_s - began_s, 2),
        "first_token_s": round(turn.first_token_s, 3),
        "own_prefill_s": round(prefill.of(turn), 3),
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
    }


def over_rounds(rounds: list[dict[str, Any]], change: str) -> dict[str, float]:
    """Sums of counts, medians of medians, and the worst of everything else."""
    spans = [span for span in rounds if span["change"] == change]

    def over(name: str) -> float:
        values: list[float] = [span[name] for span in spans]
        if name in COUNTED:
            return sum(values)
        return round(statistics.median(values), 3) if name.endswith("median_s") else max(values)

    return {name: over(name) for name in spans[0] if name not in ("change", "round", "worst_turns")}


def show(findings: Findings, audit_clean: bool, figures: dict[str, Any]) -> None:
    columns = list(next(iter(figures["changes"].values())))
    table = Table("change", *(name.replace("_", " ") for name in columns))
    for name, span in figures["changes"].items():
        table.add_row(name, *(f"{span[column]:g}" for column in columns))
    console = Console()
    console.print(table)
    console.print(
        f"{findings.turns} turns, {findings.checked} checked; attempts that failed: {failures_line(findings)};"
        f" audit {'clean' if audit_clean else 'not clean'}"
    )


def main() -> None:
    parser = talk_arguments(__doc__, sessions=12)
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265")
    parser.add_argument("--ray-address", help="HOST:PORT of the head's GCS: a node is drained, too")
    parser.add_argument("--config", type=Path, required=True, help="the file that is served")
    parser.add_argument("--changes", nargs="+", help="some of them only, by name; without: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each change is made")
    parser.add_argument("--pause-s", type=float, default=8.0, help="before, between and after the changes")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, audit_clean, figures = asyncio.run(measure(args))
    show(findings, audit_clean, figures)
    conclude(args, findings, audit_clean, figures)


if __name__ == "__main__":
    main()
