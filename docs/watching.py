"""Walks "From a leak to its repair" of docs/operations/planted-faults.md and writes down what is really printed: a
server with planted faults, Prometheus beside it, a leak, the alert, the culprit's name. Then walks docs/newcomer.py for
docs/first-steps.md.

    PYTHONPATH=. python docs/watching.py

Takes some four minutes and the ports 8000 and 9090. Needs Debian's packages `prometheus` and `chromium`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml
from newcomer import Stopwatch, walk, with_table
from transcripts import WRITTEN_URL, refreshed

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operations" / "planted-faults.md"
FIRST_STEPS = ROOT / "docs" / "first-steps.md"
PROMETHEUS_URL = "http://127.0.0.1:9090"
START_TIMEOUT_S = 150.0


def main() -> None:
    commands = Path(sys.executable).parent
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="kdwatch", dir="/tmp") as folder:
        config = config_in(Path(folder))
        environment = os.environ | {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": "walk" * 8}
        watch = Stopwatch(time.monotonic())
        kedge = started([str(commands / "kedge"), "serve", str(config)], environment)
        monitor = started(
            [sys.executable, str(ROOT / "configs/monitoring/monitor.py"), "--data", f"{folder}/monitor"],
            environment,
        )
        try:
            wait_until_up(f"{WRITTEN_URL}/health")
            watch.note("`kedge serve` answers")
            wait_until_up(f"{PROMETHEUS_URL}/-/ready")
            walk(WRITTEN_URL, PROMETHEUS_URL, watch)
            FIRST_STEPS.write_text(with_table(FIRST_STEPS.read_text(), watch.steps))
            PAGE.write_text(refreshed(PAGE.read_text(), WRITTEN_URL))
        finally:
            for process in (monitor, kedge):
                process.send_signal(signal.SIGINT)
            for process in (monitor, kedge):
                process.wait(60.0)


def config_in(folder: Path) -> Path:
    """The shipped one, with planted faults and a state directory of its own."""
    document = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text())
    args = document["applications"][0]["args"]
    args["debug"] = {"faults": True}
    args["controller"]["state_dir"] = str(folder / "state")
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)


def wait_until_up(url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"{url} does not answer")


if __name__ == "__main__":
    main()
