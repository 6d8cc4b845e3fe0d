"""Runs a cluster for hours under load, with kills, pauses, drains and rolling updates, and shows what grows.

    make serve
    RAY_AUTH_MODE=token python -m benchmarks.failures.soak --hours 3 --config configs/cluster.yaml  # same machine

`--config` is the file that `make serve` was started with: a rolling update deploys it with another size of the KV pool.
This needs Ray's token (docs/operations/cluster.md, "Ray notes"). Every turn is checked, in the ways that
benchmarks/failures/session_talkers.py lists. It samples all the time what the processes use. For each kind of process
the table compares the first third of the samples with the last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.failures.chaos import KINDS, Chaos
from benchmarks.failures.chaos import show as show_findings
from benchmarks.failures.session_talkers import Findings, Talker
from benchmarks.failures.talk_run import check_ends, conclude, open_client, talk_arguments, talking
from benchmarks.processes import footprints, parent_of
from controllers.settings import SqliteLogSettings
from serving.settings.config import parse_args

MIB = 1024 * 1024
HOUR_S = 3600.0
SETTLED_S = 120.0
"""A process that has just started still grows while it loads and allocates its buffers."""
PLANNED = ("drain", "update")
MORE_MIB = 16
REPLACED_TIMEOUT_S = 180.0


class Strikes(Chaos):
    """Kills and pauses, with planned changes among them."""

    def __init__(
        self, client: httpx.AsyncClient, findings: Findings, kinds: list[str], seed: int, deploy: Deployer
    ) -> None:
        super().__init__(client, findings, kinds, seed)
        self._deploy = deploy

    async def _strike(self, kind: str, replica_pids: list[int]) -> None:
        if kind not in PLANNED:
            await super()._strike(kind, replica_pids)
            return
        self._findings.blows[kind] += 1
        if kind == "update":
            await asyncio.to_thread(self._deploy.another_pool)
            leaving = set(replica_pids)
        else:
            replica = self._rng.choice((await self._client.get("/get_server_info")).json()["replicas"])
            reply = await self._client.post(f"/v1/kedge/replicas/{replica['replica_id']}/drain")
            reply.raise_for_status()
            leaving = {replica["pid"]}
        deadline_s = time.monotonic() + REPLACED_TIMEOUT_S
        while leaving & set(pids := await self.replicas()) or len(pids) < len(replica_pids):
            if time.monotonic() > deadline_s:
                self._findings.wrong.append(f"{kind}: not over after {REPLACED_TIMEOUT_S:.0f} s")
                return
            await asyncio.sleep(1.0)


class Deployer:
    """Makes rolling updates with `serve deploy`, as an operator does."""

    def __init__(self, config: Path, dashboard: str) -> None:
        self._document = yaml.safe_load(config.read_text())
        self._dashboard = dashboard
        self._step = MORE_MIB

    def another_pool(self) -> None:
        """Deploys the config with another size of the KV pool. Raises CalledProcessError."""
        cache = self._document["applications"][0]["args"].setdefault("cache", {})
        cache["size_mib"] = cache.get("size_mib", 256) + self._step
        self._step = -self._step
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(self._document, file)
            file.flush()
            serve = Path(sys.executable).with_name("serve")
            command = [str(serve), "deploy", file.name, "--address", self._dashboard]
            subprocess.run(command, check=True, capture_output=True, timeout=60)


@dataclass
class Series:
    """Samples of one process: seconds since the start of the run, and a value for each kind of resource it uses."""

    role: str
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Watch:
    """Samples what the processes below the parent of Ray's node use, and the session log's size."""

    def __init__(self, client: httpx.AsyncClient, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._began_s = time.monotonic()
        self.by_pid: dict[int, Series] = {}

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                info = (await self._client.get("/get_server_info")).json()
                await asyncio.to_thread(self._note, info)
            except (httpx.HTTPError, ValueError, LookupError, OSError):
                pass  # the part was struck just now, or no replica answers in time
            await asyncio.sleep(self._every_s)

    def _note(self, info: dict[str, Any]) -> None:
        now_s = time.monotonic() - self._began_s
        tasks = {part["pid"]: part["tasks"] for part in (*info["replicas"], *info["ingresses"])}
        raylet = parent_of(info["replicas"][0]["pid"])
        for footprint in footprints(parent_of(raylet)):
            values = {"memory MiB": footprint.pss_bytes / MIB, "files": float(footprint.num_files)}
            if footprint.pid in tasks:
                values["tasks"] = float(tasks[footprint.pid])
            self._add(footprint.pid, footprint.role, now_s, values)
        log = parse_args(info["settings"]).controller.log_settings()
        if isinstance(log, SqliteLogSettings):
            size = sum(path.stat().st_size for path in Path(log.path).parent.glob(Path(log.path).name + "*"))
            self._add(0, "session log", now_s, {"size MiB": size / MIB})

    def _add(self, pid: int, role: str, now_s: float, values: dict[str, float]) -> None:
        series = self.by_pid.setdefault(pid, Series(role))
        series.at_s.append(now_s)
        for name, value in values.items():
            series.values[name].append(value)

    def growth(self) -> list[dict[str, Any]]:
        """A row for each kind of process and resource: medians of the first and of the last third of the samples. They
        are from the process that lived longest, without its first SETTLED_S seconds."""
        rows = []
        for role in sorted({series.role for series in self.by_pid.values()}):
            kin = [series for series in self.by_pid.values() if series.role == role]
            longest = max(kin, key=lambda series: series.at_s[-1] - series.at_s[0])
            start_s = longest.at_s[0]
            for name, values in longest.values.items():
                settled = [
                    value
                    for at_s, value in zip(longest.at_s[-len(values) :], values, strict=True)
                    if at_s - start_s > SETTLED_S or not longest.at_s[0]
                ]
                third = len(settled) // 3
                if not third:
                    continue
                first, last = statistics.median(settled[:third]), statistics.median(settled[-third:])
                lived_h = (longest.at_s[-1] - start_s) / HOUR_S
                rows.append(
                    {
                        "role": role,
                        "processes": len(kin),
                        "lived_h": round(lived_h, 3),
                        "what": name,
                        "first_third": round(first, 1),
                        "last_third": round(last, 1),
                        "growth_per_h": round((last - first) / (lived_h * 2 / 3), 2),
                    }
                )
        return rows


async def measure(args: argparse.Namespace) -> tuple[Findings, bool, list[dict[str, Any]]]:
    """Returns what was found, whether the audit at the end is clean, and what grew."""
    findings = Findings()
    async with open_client(args) as client:
        talkers = [Talker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        deployer = Deployer(args.config, args.dashboard)
        strikes = Strikes(client, findings, args.strike, args.seed, deployer)
        watch = Watch(client, args.sample_s)
        until_s = time.monotonic() + args.hours * HOUR_S
        async with talking(talkers), asyncio.TaskGroup() as group:
            group.create_task(strikes.run(args.every_s, until_s))
            group.create_task(watch.run(until_s))
        return findings, await check_ends(client, talkers), watch.growth()


def show_growth(rows: list[dict[str, Any]]) -> None:
    table = Table("process", "how many", "lived h", "what", "first third", "last third", "an hour")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def main() -> None:
    parser = talk_arguments(__doc__, sessions=12)
    add: Callable[..., Any] = parser.add_argument
    add("--dashboard", default="http://127.0.0.1:8265")
    add("--config", type=Path, required=True)
    add("--hours", type=float, default=3.0)
    add("--every-s", type=float, default=60.0, help="pause between two blows")
    add("--sample-s", type=float, default=15.0)
    add(
        "--strike",
        nargs="+",
        choices=(*KINDS, *PLANNED),
        default=["replica", "pause", "controller", *PLANNED],
    )
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, clean, growth = asyncio.run(measure(args))
    show_findings(findings, clean)
    show_growth(growth)
    conclude(args, findings, clean, {"growth": growth})


if __name__ == "__main__":
    main()
