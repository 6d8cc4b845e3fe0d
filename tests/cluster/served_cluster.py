"""A real cluster for tests: `kedge serve` on a copy of a config, on free ports, in a Ray session of its own."""

from __future__ import annotations

import copy
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 30.0
APPLICATIONS = "/api/serve/applications/"
REPLICA = "ray::ServeReplica:kedge:"
"""Start of the titles of all processes of the application that Serve starts: engine replicas and front ends."""


def free_port() -> int:
    """A free port below the ephemeral ports of the system and above those of Ray's workers, so that nobody takes it
    later."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def eventually(holds: Callable[[], Any], timeout_s: float = 20.0, interval_s: float = 0.1) -> Any:
    """The first true result of `holds`. Fails after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if answer := holds():
            return answer
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {holds}"
        time.sleep(interval_s)


Edit = Callable[[dict[str, Any]], None]
"""Changes a parsed config."""


def as_shipped(document: dict[str, Any]) -> None:
    """Leaves the config unchanged."""


class ServedCluster:
    """`kedge serve` in a process group of its own, with a token. `edit` changes the parsed config before it is written.
    `always` changes it first, and also before an edit that `use` is given. Entries put into `environment` and `options`
    before `start` are added to those of `kedge serve`. `kedge` is its command, and may be replaced where it is not
    installed."""

    def __init__(self, config: Path, edit: Edit = as_shipped, always: Edit = as_shipped) -> None:
        # Ray's sockets need a short path. pytest's own directories are too long.
        self.directory = Path(tempfile.mkdtemp(prefix="kd", dir="/tmp"))
        self.state_dir = self.directory / "state"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        document = yaml.safe_load(config.read_text())
        document["http_options"]["port"] = self.port
        for application in document["applications"]:
            application["args"].setdefault("controller", {})["state_dir"] = str(self.state_dir)
        always(document)
        self.config = self.directory / "cluster.yaml"
        self._common: dict[str, Any] = document
        self._configure(self._edited(edit))
        self.log = self.directory / "log"
        self.environment: dict[str, str] = {}
        self.options: list[str] = []
        self.kedge = [str(Path(sys.executable).with_name("kedge"))]
        self.start_timeout_s = START_TIMEOUT_S
        self.token = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def use(self, edit: Edit) -> None:
        """Runs the cluster with this change of the config. Starts it, or deploys over what ran with another change.
        Returns when no process and no session of the former deployment is left."""
        document = self._edited(edit)
        if self._process is None:
            self._configure(document)
            self.start()
        elif document != self._configured():
            self._close_all_sessions()
            former, deployed_s = set(self.pids(REPLICA)), self.application()["last_deployed_time_s"]
            self._deploy(document)
            eventually(lambda: self._in_place_of(former, deployed_s), START_TIMEOUT_S, 0.25)

    def start_unless_it_runs(self) -> None:
        """With whatever change of the config it has."""
        if self._process is None:
            self.start()

    def start(self) -> None:
        environment = (
            os.environ
            | {
                "RAY_TMPDIR": str(self.directory),
                "RAY_AUTH_TOKEN": self.token,  # Ray itself requires tokens
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
                "RAY_worker_niceness": "0",  # by default Ray gives its workers a lower priority than the tests have
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "cluster")]),
            }
        )
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
            environment.pop(name, None)
        environment |= self.environment
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.kedge, "serve", str(self.config), *self.options],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            eventually(self._all_replicas_up, self.start_timeout_s, 0.25)
        except AssertionError as error:
            told = self.log_text()
            self.stop()
            raise AssertionError(f"the cluster did not start ({error}):\n{told[-4000:]}") from error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Sends SIGINT, as a user would, and then SIGKILL to what is left of the group."""
        process = self._process
        if process is None:
            return
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
            try:
                process.wait(STOP_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def deploy(self, edit: Edit) -> None:
        """Deploys the changed config as `serve deploy` does. Returns once Serve has accepted it."""
        document = self._configured()
        edit(document)
        self._deploy(document)

    def _deploy(self, document: dict[str, Any]) -> None:
        self._configure(document)
        with self.dashboard() as dashboard:
            dashboard.put(APPLICATIONS, json=document).raise_for_status()

    def _edited(self, edit: Edit) -> dict[str, Any]:
        document = copy.deepcopy(self._common)
        edit(document)
        return document

    def _configure(self, document: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(document))

    def _configured(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.config.read_text()))

    def restore(self) -> None:
        """Returns when all replicas are there, and no session."""
        eventually(self._all_replicas_up, START_TIMEOUT_S, 0.25)
        self._close_all_sessions()

    def _close_all_sessions(self) -> None:
        with self.client() as client:
            for session_id, session in self.sessions().items():
                headers = {"x-tenant-id": session["tenant"]} if session["tenant"] else {}
                closing = client.post("/close_session", json={"session_id": session_id}, headers=headers)
                closing.raise_for_status()
        eventually(lambda: not self.sessions())

    def _in_place_of(self, former: set[int], deployed_s: float) -> bool:
        """Whether all processes belong to the last deployment and the former processes have ended."""
        application = self.application()
        if application["last_deployed_time_s"] <= deployed_s or former & set(self.pids(REPLICA)):
            return False
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return application["status"] == "RUNNING" and self._all_replicas_up()

    def application(self) -> dict[str, Any]:
        """What Serve reports about the application: `status`, `message`, and each of its `deployments`."""
        with self.dashboard() as dashboard:
            answer = dashboard.get(APPLICATIONS).raise_for_status().json()
        (application,) = answer["applications"].values()
        return dict(application)

    def dashboard(self, **headers: str) -> httpx.Client:
        """A client of Ray's dashboard. It sends the token unless other headers are given."""
        found = re.search(r"dashboard at .*?(http://[\d.:]+)", self.log_text())
        assert found is not None, self.log_text()
        headers = headers or {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=found[1], headers=headers, timeout=60.0)

    def terminate(self) -> int:
        """Sends SIGTERM, as a service manager would. Returns the exit status once `kedge serve` has ended. What it
        wrote stays, and `start` may follow."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(2 * STOP_TIMEOUT_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=httpx.Timeout(60.0), **options)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What each replica reports about itself, by id."""
        with self.client() as client:
            listed = client.get("/get_server_info").json()["replicas"]
        return {replica["replica_id"]: replica for replica in listed}

    def sessions(self) -> dict[str, dict[str, Any]]:
        with self.client() as client:
            listed = client.get("/v1/kedge/sessions").json()["sessions"]
        return {session["session_id"]: session for session in listed}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with that name and those labels."""
        with self.client() as client:
            text = client.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def pages(self) -> dict[str, int]:
        """The KV books of all replicas together, by account."""
        accounts = ("total", "free", "cached", "protected", "session", "in_flight", "leaked")
        replicas = self.replicas().values()
        return {account: sum(replica["pages"][account] for replica in replicas) for account in accounts}

    def nothing_runs(self) -> bool:
        return self.pages()["in_flight"] == 0 and all(
            replica["live_turns"] == 0 and replica["running"] == 0 for replica in self.replicas().values()
        )

    def pids(self, title: str) -> list[int]:
        """Processes of this cluster, and of no other on the machine, whose title begins with `title`."""
        mark = f"RAY_TMPDIR={self.directory}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                titled = path.joinpath("cmdline").read_bytes().startswith(title.encode())
                if titled and mark in path.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _all_replicas_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "serve run ended"
        replicas = self._configured()["applications"][0]["args"]["replicas"]
        fewest = replicas.get("autoscaling", {}).get("min_replicas", 1)
        count: int = replicas.get("count", fewest)
        try:
            return len(self.replicas()) == count
        except (httpx.HTTPError, ValueError, KeyError):
            return False
