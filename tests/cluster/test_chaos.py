"""Processes are killed under load by benchmarks/failures/chaos.py, for some seconds. No attempt fails and every turn is
right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from served_cluster import ROOT, ServedCluster, eventually


def test_killed_replicas_and_controllers_go_unnoticed(cluster: ServedCluster, tmp_path: Path) -> None:
    record, seed = tmp_path / "chaos.json", random.randrange(2**31)
    options = {"url": cluster.url, "seconds": 20, "every-s": 4, "sessions": 6, "seed": seed, "json": record}
    command = [sys.executable, "-m", "benchmarks.failures.chaos", "--strike", "replica", "controller"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    findings = json.loads(record.read_text())["findings"]
    # No attempt of any client failed, so no client noticed a killed process. And no turn was left unchecked.
    assert findings["failures"] == {}
    assert findings["turns"] > 0
    assert findings["turns"] == findings["logged"] == findings["checked"]
    assert findings["wrong"] == []
    assert sum(findings["blows"].values()) > 0
    eventually(lambda: len(cluster.replicas()) == 2, 90)
