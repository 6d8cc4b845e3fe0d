"""Which alerts fire in an hour of mixed load, with rolling updates, drains, killed replicas and gaps in the scrapes?

    python -m benchmarks.failures.quiet_hour --json quiet_hour.json

Starts a cluster of the shipped config, and Debian's Prometheus beside it with the shipped rules. Prometheus scrapes
and evaluates as often as configs/monitoring/prometheus.yml says. The load is benchmarks/failures/soak.py: it checks
every turn, drains replicas and updates the cluster. The exit status is 1 if an alert fires that is not in EXPECTED, if
one in EXPECTED does not fire, or if a turn is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from tests.cluster.live_prometheus import LivePrometheus
from tests.cluster.served_cluster import ROOT, ServedCluster, eventually

EXPECTED = {"KedgeReplicaLost"}
"""Alerts that must fire, since replicas are killed."""
SCRAPE_S = 5
GAP_S = 45.0
"""Shorter than Kedge may be away before an alert fires."""
HOUR_S = 3600.0
KILLS_AN_HOUR = 3
"""Far enough apart not to count as a burst of failovers."""
FIRST_KILL_S, FIRST_GAP_S = 450.0, 900.0
"""Seconds into each share of the hour, which has one kill and one gap."""
ALL_UP_TIMEOUT_S = 180.0


def load(cluster: ServedCluster, folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    with cluster.dashboard() as dashboard:
        address = str(dashboard.base_url)
    command = [sys.executable, "-m", "benchmarks.failures.soak", "--url", cluster.url]
    command += ["--dashboard", address, "--config", str(cluster.config), "--hours", str(args.hours)]
    command += ["--sessions", str(args.sessions), "--every-s", str(args.every_s), "--seed", str(args.seed)]
    command += ["--strike", "drain", "update", "--json", str(folder / "soak.json")]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | token, stdout=subprocess.DEVNULL)


def kill_one(cluster: ServedCluster) -> None:
    """Waits until all replicas are up, which a crash would not do."""

    def two() -> list[dict[str, Any]]:
        try:
            replicas = list(cluster.replicas().values())
        except LookupError:
            return []
        return replicas if len(replicas) == 2 else []

    victim = random.choice(eventually(two, ALL_UP_TIMEOUT_S, 1.0))
    cluster.kill(victim["pid"])


def disturb(cluster: ServedCluster, prometheus: LivePrometheus, until_s: float) -> dict[str, int]:
    """Makes kills and gaps in turn until `until_s`; returns how many of each."""
    share_s = HOUR_S / KILLS_AN_HOUR
    begins_s, done = time.monotonic(), {"replicas killed": 0, "gaps in the scrapes": 0}
    while begins_s + FIRST_GAP_S + GAP_S < until_s:
        time.sleep(max(0.0, begins_s + FIRST_KILL_S - time.monotonic()))
        kill_one(cluster)
        done["replicas killed"] += 1
        time.sleep(max(0.0, begins_s + FIRST_GAP_S - time.monotonic()))
        prometheus.reach(False)
        time.sleep(GAP_S)
        prometheus.reach()
        done["gaps in the scrapes"] += 1
        begins_s += share_s
        time.sleep(max(0.0, min(begins_s, until_s) - time.monotonic()))
    return done


def fired(prometheus: LivePrometheus, seconds: float) -> dict[str, dict[str, int]]:
    """By alert: the seconds in which it was pending and firing, summed over the replicas."""
    found: dict[str, dict[str, int]] = {}
    samples = prometheus.query(f"sum by (alertname, alertstate) (count_over_time(ALERTS[{seconds:.0f}s]))")
    for each in samples:
        states = found.setdefault(each["metric"]["alertname"], {"pending_s": 0, "firing_s": 0})
        states[f"{each['metric']['alertstate']}_s"] = int(each["value"][1]) * SCRAPE_S
    return found


def show(alerts: dict[str, dict[str, int]], happened: dict[str, int], findings: dict[str, Any]) -> None:
    table = Table("alert", "pending s", "firing s", "")
    for name, states in sorted(alerts.items()):
        remark = "as it should" if name in EXPECTED else "wrong" if states["firing_s"] else "did not fire"
        table.add_row(name, str(states["pending_s"]), str(states["firing_s"]), remark)
    Console().print(table)
    print(", ".join(f"{count} {what}" for what, count in (happened | findings["blows"]).items()))
    print(f"{findings['turns']:,} turns, {findings['tokens']:,} tokens, {len(findings['wrong'])} wrong")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cluster = ServedCluster(ROOT / "configs" / "cluster.yaml")
    prometheus = LivePrometheus(cluster.port, (1.0,))
    try:
        cluster.start()
        prometheus.start()
        prometheus.scrape_every(SCRAPE_S, SCRAPE_S)
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            talkers = load(cluster, Path(folder), args)
            happened = disturb(cluster, prometheus, began_s + args.hours * HOUR_S)
            talkers.wait(600.0)
            soak: dict[str, Any] = json.loads((Path(folder) / "soak.json").read_text())
        alerts = fired(prometheus, time.monotonic() - began_s)
    finally:
        prometheus.stop()
        cluster.stop()
    return {"alerts": alerts, "happened": happened, "soak": soak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=300.0, help="pause between two drains or updates")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    random.seed(args.seed)
    found = measure(args)
    soak = found["soak"]
    show(found["alerts"], found["happened"], soak["findings"])
    save_record(args.json, hours=args.hours, **found)
    fires = {name for name, states in found["alerts"].items() if states["firing_s"]}
    if fires != EXPECTED or soak["findings"]["wrong"] or not soak["audit_clean"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
