"""Kills processes of a running cluster while clients talk to it, and checks whether a token was lost, doubled or wrong.

    make serve
    python benchmarks/chaos.py --seconds 600 --every-s 15 --json chaos.json     # on the same machine

Every turn is checked, in the ways that benchmarks/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from pathlib import Path

import httpx
from measure import save_record
from processes import siblings
from rich.console import Console
from rich.table import Table
from session_talkers import GIVE_UP_S, SILENCE_S, Findings, Talker

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
        count = len(await self.replicas())
        while time.monotonic() + every_s < until_s:
            await asyncio.sleep(every_s)
            pids = await self.replicas()
            if len(pids) == count:
                await self._strike(self._rng.choice(self._kinds), pids)

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
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=GIVE_UP_S, limits=limits) as client:
        talkers = [Talker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        chaos = Chaos(client, findings, args.strike, args.seed)
        until_s = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.run(args.every_s, until_s))
            for talker in talkers:
                group.create_task(talker.talk(until_s))
        listed = (await client.get("/v1/kedge/sessions")).json()["sessions"]
        by_id = {session["session_id"]: session for session in listed}
        for talker in talkers:
            await talker.check_end(by_id)
        audit = (await client.get("/v1/kedge/audit")).json()
    return findings, bool(audit["clean"])


def show(findings: Findings, clean: bool) -> None:
    table = Table("what", "figure")
    silences_s = findings.silences_s
    for name, value in {
        "turns, tokens": f"{findings.turns:,}, {findings.tokens:,}",
        "blows": ", ".join(f"{count} {kind}" for kind, count in findings.blows.items()) or "none",
        "attempts that failed": ", ".join(f"{n} {code}" for code, n in findings.failures.most_common())
        or "none",
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
    for line in findings.wrong[:20]:
        print(line[:2000])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every-s", type=float, default=15.0, help="pause between two blows")
    parser.add_argument("--strike", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, clean = asyncio.run(measure(args))
    show(findings, clean)
    settings = {name: getattr(args, name) for name in ("seconds", "every_s", "sessions", "seed")}
    save_record(args.json, settings=settings, findings=vars(findings), audit_clean=clean)
    if findings.wrong or not clean or not findings.all_checked:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
