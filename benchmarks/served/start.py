"""How long `kedge serve` takes to its first answer, and how much memory it uses. Beside it runs an application of Ray
Serve that has as many replicas and does nothing.

    python -m benchmarks.served.start --json start.json

The two are started in turn (A B A B) with the same environment. Time is from the command to the first answer; memory is
the PSS of all processes below the command once it has answered.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from benchmarks.processes import footprints

ROOT = Path(__file__).resolve().parents[2]
PORT = 8437
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.05
SETTLE_S = 3.0
MIB = 2**20

EMPTY_APP = """\
from ray import serve
from starlette.requests import Request


@serve.deployment
class Nothing:
    pass


@serve.deployment
class Front:
    def __init__(self, *_: object) -> None:
        pass

    async def __call__(self, request: Request) -> str:
        return "nothing"


def build(args: dict):
    return Front.options(num_replicas=1, ray_actor_options={"num_cpus": 0.1}).bind(
        Nothing.options(num_replicas=int(args["replicas"]), ray_actor_options={"num_cpus": 0.5}).bind()
    )
"""


def configs(folder: Path) -> dict[str, Path]:
    """Writes the two configurations into the folder; returns their paths."""
    kedge: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text())
    kedge["http_options"]["port"] = PORT
    args = kedge["applications"][0]["args"]
    args.setdefault("controller", {})["state_dir"] = str(folder / "state")
    args["model"]["path"] = str(ROOT / args["model"]["path"])
    empty = copy.deepcopy(kedge)
    empty["applications"][0] |= {
        "import_path": "empty_app:build",
        "args": {"replicas": args["replicas"]["count"]},
    }
    (folder / "empty_app.py").write_text(EMPTY_APP)
    paths = {"empty": folder / "empty.yaml", "kedge": folder / "kedge.yaml"}
    paths["empty"].write_text(yaml.safe_dump(empty))
    paths["kedge"].write_text(yaml.safe_dump(kedge))
    return paths


def commands(paths: dict[str, Path], proxy: str) -> dict[str, list[str]]:
    """Kedge as its users start it; the empty application by `serve run`, as it is no Kedge, with the same variables."""
    executables = Path(sys.executable).parent
    return {
        "empty": [str(executables / "serve"), "run", str(paths["empty"])],
        "kedge": [str(executables / "kedge"), "serve", "--proxy", proxy, str(paths["kedge"])],
    }


def environment(folder: Path, proxy: str) -> dict[str, str]:
    from serving.cli.start.environment import Proxy, serve_environment
    from serving.cli.start.port_claims import PortClaims

    inherited = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return serve_environment(inherited, Path(sys.executable).parent, Proxy(proxy), PortClaims())


def measure(command: list[str], env: dict[str, str], path: str) -> dict[str, float]:
    """Starts the command, waits for its first answer, measures its memory and ends it."""
    before_s = time.monotonic()
    while _answers(path):  # the server before, whose proxy may end after the command
        if time.monotonic() - before_s > STOP_TIMEOUT_S:
            raise SystemExit(f"somebody else answers at port {PORT}")
        time.sleep(POLL_S)
    begin_s = time.monotonic()
    served = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not _answers(path):
            if served.poll() is not None or time.monotonic() - begin_s > READY_TIMEOUT_S:
                raise SystemExit(f"{command} did not come up")
            time.sleep(POLL_S)
        ready_s = time.monotonic() - begin_s
        time.sleep(SETTLE_S)
        memory: dict[str, float] = {}
        for each in footprints(served.pid):
            memory[each.role] = memory.get(each.role, 0.0) + each.pss_bytes / MIB
        return {"ready_s": ready_s, "pss_mib": sum(memory.values())} | {
            f"{k} MiB": v for k, v in memory.items()
        }
    finally:
        served.send_signal(signal.SIGINT)
        try:
            served.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(served.pid, signal.SIGKILL)
            served.wait()


def _answers(path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}{path}", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--proxy", choices=("haproxy", "ray"), default="haproxy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"empty": [], "kedge": []}
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        folder = Path(name)
        paths = configs(folder)
        env = environment(folder, args.proxy)
        for _ in range(args.rounds):
            for what, command in commands(paths, args.proxy).items():
                runs[what].append(measure(command, env, "/health" if what == "kedge" else "/"))
    rows = sorted({row for each in runs.values() for run in each for row in run})
    medians = {
        what: {row: statistics.median(run.get(row, 0.0) for run in each) for row in rows}
        for what, each in runs.items()
    }
    table = Table("", "empty", "kedge")
    for row in sorted(rows, key=lambda row: (row not in ("ready_s", "pss_mib"), row)):
        table.add_row(row, *(f"{medians[what][row]:.1f}" for what in ("empty", "kedge")))
    Console().print(table)
    save_record(args.json, proxy=args.proxy, runs=runs, medians=medians)


if __name__ == "__main__":
    main()
