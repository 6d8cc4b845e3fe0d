"""Changes a running cluster under streaming sessions: a rolling update, fewer replicas, more again, a drain by hand.
Does a turn fail, how long is the worst first token, does throughput ever stand still?

    make serve CONFIG=my.yaml
    python benchmarks/planned_changes.py --config my.yaml --json planned_changes.json

The changes go to Ray Serve as `serve deploy` sends them. Every turn is checked, in the ways that
benchmarks/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import yaml
from measure import machine
from rich.console import Console
from rich.table import Table
from session_talkers import GIVE_UP_S, Answer, Findings, Talker

SETTLED_S = 180.0
LATE_S = 1.0


class Streaming(Talker):
    """Always streams, and notes when tokens came, when turns ended, and what their first tokens took."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, seed: str) -> None:
        super().__init__(client, findings, seed, stream_share=1.0, leaving_share=0.0)
        self._asked_s: float | None = None
        self.ended_s: list[float] = []
        self.heard_s: list[float] = []
        self.first_tokens: list[tuple[float, float]] = []
        """When each turn was asked for, and the seconds to its first token, failed attempts included."""

    async def next_turn(self) -> None:
        self._asked_s = None
        await super().next_turn()

    async def _attempt(self, *args: Any) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        await super()._attempt(*args)

    def _heard(self) -> None:
        self.heard_s.append(time.monotonic())
        if self._asked_s is not None:
            self.first_tokens.append((self._asked_s, time.monotonic() - self._asked_s))
            self._asked_s = None

    def _note(self, new: list[int], answer: Answer, told: list[int]) -> None:
        self.ended_s.append(time.monotonic())
        super()._note(new, answer, told)


class Deployment:
    """The served application, as its config file says, and as it is changed."""

    def __init__(self, client: httpx.AsyncClient, dashboard: str, config: Path) -> None:
        self._client = client
        self._applications = f"{dashboard}/api/serve/applications/"
        self._document = yaml.safe_load(config.read_text())

    async def change(self, section: str, **values: Any) -> None:
        self._document["applications"][0]["args"].setdefault(section, {}).update(values)
        (await self._client.put(self._applications, json=self._document)).raise_for_status()

    async def scale(self, count: int) -> None:
        """By Serve's own override: what is changed in `args` replaces every replica."""
        override = [{"name": "LLMReplica", "num_replicas": count}]
        self._document["applications"][0]["deployments"] = override
        (await self._client.put(self._applications, json=self._document)).raise_for_status()

    async def settled(self, count: int, gone: set[str]) -> None:
        """Until `count` replicas answer, none of them of those that are to be `gone`."""
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


def changes_of(deployment: Deployment, count: int) -> dict[str, Callable[[], Awaitable[None]]]:
    """By name. Each returns once it is carried out."""

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

    return {
        "rolling update": update,
        f"{count} to 1": lambda: scale(1),
        f"1 to {count}": lambda: scale(count),
        "kedge drain": drain,
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    findings, spans = Findings(), dict[str, tuple[float, float]]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=GIVE_UP_S, limits=limits) as client:
        talkers = [Streaming(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        deployment = Deployment(client, args.dashboard, args.config)
        over = asyncio.Event()

        async def talk(talker: Streaming) -> None:
            while not over.is_set():
                await talker.next_turn()
            await talker.check_answers()

        talks = [asyncio.create_task(talk(talker)) for talker in talkers]
        await asyncio.sleep(args.pause_s)
        for name, change in changes_of(deployment, len(await deployment.replicas())).items():
            began_s = time.monotonic()
            await change()
            spans[name] = began_s, time.monotonic()
            await asyncio.sleep(args.pause_s)
        over.set()
        await asyncio.gather(*talks)
        audit = (await client.get("/v1/kedge/audit")).json()
    return {
        "changes": {name: span_figures(talkers, *span) for name, span in spans.items()},
        "all_checked": findings.all_checked,
        "audit_clean": bool(audit["clean"]),
        "findings": vars(findings),
    }


def span_figures(talkers: list[Streaming], began_s: float, ended_s: float) -> dict[str, float]:
    """Of the turns that were asked for, and ended, while one change was carried out."""
    waits_s = [wait for each in talkers for at_s, wait in each.first_tokens if began_s <= at_s <= ended_s]
    ends_s = sorted(at_s for each in talkers for at_s in each.ended_s if began_s <= at_s <= ended_s)
    heard_s = sorted(at_s for each in talkers for at_s in each.heard_s if began_s <= at_s <= ended_s)
    return {
        "took_s": round(ended_s - began_s, 1),
        "turns": len(ends_s),
        "first_token_median_s": round(statistics.median(waits_s), 3) if waits_s else 0.0,
        "first_token_worst_s": round(max(waits_s, default=0.0), 3),
        "first_tokens_late": sum(wait_s > LATE_S for wait_s in waits_s),
        "longest_without_an_end_s": longest_gap_s([began_s, *ends_s, ended_s]),
        "longest_without_a_token_s": longest_gap_s([began_s, *heard_s, ended_s]),
    }


def longest_gap_s(times_s: list[float]) -> float:
    return round(max(after - before for before, after in pairwise(times_s)), 3)


def show(figures: dict[str, Any]) -> None:
    columns = list(next(iter(figures["changes"].values())))
    table = Table("change", *(name.replace("_", " ") for name in columns))
    for name, span in figures["changes"].items():
        table.add_row(name, *(f"{span[column]:g}" for column in columns))
    console, findings = Console(), figures["findings"]
    console.print(table)
    failures = ", ".join(f"{count} {code}" for code, count in findings["failures"].items()) or "none"
    console.print(
        f"{findings['turns']} turns, {findings['checked']} checked; attempts that failed: {failures}"
    )
    for line in findings["wrong"][:20]:
        print(line[:2000])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265")
    parser.add_argument("--config", type=Path, required=True, help="the file that is served")
    parser.add_argument("--pause-s", type=float, default=8.0, help="before, between and after the changes")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    figures = asyncio.run(measure(args))
    show(figures)
    if args.json is not None:
        settings = {"sessions": args.sessions, "seed": args.seed, "pause_s": args.pause_s}
        args.json.write_text(
            json.dumps({"machine": machine(), "settings": settings, **figures}, indent=1) + "\n"
        )
    if figures["findings"]["wrong"] or not figures["audit_clean"] or not figures["all_checked"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
