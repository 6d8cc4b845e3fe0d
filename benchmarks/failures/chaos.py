"""Kills processes of a running cluster while clients talk to it, and checks whether a token was lost, doubled or wrong.

    make serve
    python -m benchmarks.failures.chaos --seconds 600 --every-s 15 --json chaos.json     # on the same machine

Every turn is checked, in the ways that benchmarks/failures/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import time

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.failures.session_talkers import SILENCE_S, Findings, Talker
from benchmarks.failures.talk_run import (
    check_ends,
    conclude,
    failures_line,
    open_client,
    talk_arguments,
    talking,
)
from benchmarks.processes import siblings

STOPPED_S = 15.0
"""Longer than a replica may be silent."""
TITLES = {"controller": "ray::ClusterController", "ingress": "ray::ServeReplica:kedge:Ingress"}
KINDS = ("replica", "pause", *TITLES)


class Chaos:
    """Strikes one process after another, each time when all replicas are up again."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, kinds: list[str], seed: int) -> None:
        self._client = client
        self._findings = findings
        self._kinds = kinds
        self._rng = random.Random(seed)

    async def run(self, every_s: float, until_s: float) -> None:
        """Strikes every `every_s` seconds. Returns at `until_s`."""
        count = len(await self.replicas())
        while time.monotonic() + every_s < until_s:
            await asyncio.sleep(every_s)
            pids = await self.replicas()
            if len(pids) == count:
                await self._strike(self._rng.choice(self._kinds), pids)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def replicas(self) -> list[int]:
        """The process ids of the replicas that answer."""
        try:
            reply = await self._client.get("/get_server_info")
            return [replica["pid"] for replica in reply.json()["replicas"]]
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    async def _strike(self, kind: str, replica_pids: list[int]) -> None:
        victims = replica_pids if kind not in TITLES else siblings(replica_pids[0], TITLES[kind])
        if not victims:
            return
        victim = self._rng.choice(victims)
        self._findings.blows[kind] += 1
        if kind != "pause":
            os.kill(victim, signal.SIGKILL)
            return
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(victim, signal.SIGCONT)


async def measure(args: argparse.Namespace) -> tuple[Findings, bool]:
    """Returns what was found, and whether the audit at the end is clean."""
    findings = Findings()
    async with open_client(args) as client:
        talkers = [Talker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        chaos = Chaos(client, findings, args.strike, args.seed)
        async with talking(talkers):
            await chaos.run(args.every_s, time.monotonic() + args.seconds)
        return findings, await check_ends(client, talkers)


def show(findings: Findings, clean: bool) -> None:
    table = Table("what", "figure")
    silences_s = findings.silences_s
    for name, value in {
        "turns, tokens": f"{findings.turns:,}, {findings.tokens:,}",
        "blows": ", ".join(f"{count} {kind}" for kind, count in findings.blows.items()) or "none",
        "attempts that failed": failures_line(findings),
        "turns that a client repeated": f"{findings.repeated_turns:,} ({findings.left:,} had left)",
        "of these answered from the log": f"{findings.replayed_turns:,}",
        f"answers silent for more than {SILENCE_S:.0f} s": f"{len(silences_s):,}"
        + (
            f", median {statistics.median(silences_s):.1f} s, longest {max(silences_s):.1f} s"
            if silences_s
            else ""
        ),
        "turns found in the log": f"{findings.logged:,}",
        "turns whose answer is the model's": f"{findings.checked:,} ({findings.asked_afresh:,} asked afresh)",
        "lost, doubled or wrong": f"{len(findings.wrong):,}",
        "audit": "clean" if clean else "not clean",
    }.items():
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    parser = talk_arguments(__doc__, sessions=16)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every-s", type=float, default=15.0, help="pause between two blows")
    parser.add_argument("--strike", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, clean = asyncio.run(measure(args))
    show(findings, clean)
    conclude(args, findings, clean, {})


if __name__ == "__main__":
    main()
