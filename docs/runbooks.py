"""Runs the commands of docs/runbooks.md as they are written, on a cluster with the faults that they are for.

    python docs/runbooks.py

Takes about a minute and a half on two idle cores, on free ports. Ends with status 1 at the first command that does not
do what the page says, at a file or a metric that is not there, and at code of the page that docs/runbook_page.py does
not know.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cluster")]

from runbook_page import Code, Kind, code_of_the_page, is_defined  # noqa: E402 - the path comes first
from served_cluster import ServedCluster, eventually  # noqa: E402
from transcripts import WRITTEN_URL  # noqa: E402

from tests.unit.controllers.redis_sentinels import SERVICE, WatchedRedis  # noqa: E402
from tests.unit.controllers.redis_server import RedisServer  # noqa: E402

KEY = "an-operators-key"
FAULTS = "/v1/kedge/debug/faults"
WRITTEN_DASHBOARD = "http://127.0.0.1:8265"
DASHBOARDS = ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS")
CONTROLLER = "ray list actors --filter class_name=ClusterController --detail"
DEAD = "ray list actors --filter state=DEAD --detail"
DRAIN, KILL = "kedge drain REPLICA", "kill -9 PID"
SHOWN_LINES, SHOWN_WIDTH = 5, 110
NOT_RUN = {
    "make serve": "installs into .venv; this runs in what it installed",
    "kedge serve": "names the process; `kedge serve CONFIG` is run",
    "ray list actors": "names what prints the message; it is run with its options",
    "python docs/runbooks.py": "is this",
    "ray stop": "would end every Ray cluster of the machine, other people's too",
}
NEEDED = {
    "nvidia-smi": "no GPU here",
    "redis-cli": "Redis is not installed (redis-server, redis-sentinel, redis-cli)",
}
"""Programs, and why commands that begin with them are not run where they do not work."""


class KeyedCluster(ServedCluster):
    """As shipped, except that calls need an operator's key and faults may be planted."""

    def __init__(self) -> None:
        def edit(document: dict[str, Any]) -> None:
            document["applications"][0]["args"]["debug"] = {"faults": True}

        super().__init__(ROOT / "configs" / "cluster.yaml", edit)
        self.environment["KEDGE_OPERATOR_KEYS"] = KEY

    def client(self, **options: Any) -> httpx.Client:
        return super().client(headers={"x-api-key": KEY}, **options)

    def chat(self, session: str, said: str = "Hello.") -> None:
        body = {"model": "kedge-chat", "max_tokens": 8, "messages": [{"role": "user", "content": said}]}
        with super().client(headers={"x-api-key": KEY, "x-session-id": session}) as client:
            reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    def plant(self, kind: str, **fields: Any) -> dict[str, Any]:
        with self.client() as client:
            return dict(client.post(FAULTS, json={"kind": kind, **fields}).raise_for_status().json())

    def logs(self, pattern: str) -> list[Path]:
        return list(self.directory.glob(f"ray/session_latest/logs/{pattern}"))


class Walk:
    """Goes through the page in its order. What only looks is run where it stands first, and again where a step below
    plants what the section is about. Drains and kills are run only there."""

    def __init__(self, cluster: KeyedCluster, redis: tuple[RedisServer, WatchedRedis] | None) -> None:
        self._cluster = cluster
        self._filled = {"KEDGE_API_KEY=...": f"KEDGE_API_KEY={KEY}", WRITTEN_URL: cluster.url}
        self._filled |= {"CONFIG": str(cluster.config), "FOLDER": str(cluster.state_dir)}
        self._filled["/tmp/ray/"] = f"{cluster.directory}/ray/"
        self._redis = redis is not None
        if redis is not None:
            alone, watched = redis
            host, _, port = watched.log(0).url.split("/")[2].partition(":")
            self._filled |= {"REDIS_URL": f"redis://127.0.0.1:{watched.master()}", "SERVICE": SERVICE}
            self._filled |= {"SOCKET": alone.url.removeprefix("unix://"), "HOST": host, "26379": port}
        self._exports: list[str] = []
        self._done: set[str] = set()
        self._leaky = ""
        self._steps: dict[tuple[str, str], Callable[[str], object]] = {
            ("KedgeLeakedPages", "kedge audit"): self._audit_of_a_leak,
            ("KedgeLeakedPages", DRAIN): self._run,
            ("KedgeLeakedPages", "kedge info"): self._info_without_the_leaky,
            ("KedgeOrphanedSessions", "kedge sessions"): self._sessions_with_an_orphan,
            ("KedgeOrphanedSessions", "kedge info"): self._run,
            ("KedgeOrphanedSessions", DRAIN): self._run,
            ("KedgeLogAway", KILL): self._kill_of_the_controller,
            ("KedgeDown", "kedge serve CONFIG"): self._second_start,
            ("KedgeReplicaLost", DEAD): self._reason_of_a_death,
            ("KedgeControllerAway", CONTROLLER): self._run,
            ("KedgeEngineStalled", KILL): self._kill_of_a_hung_replica,
        }

    def take(self, code: Code) -> None:
        if code.kind is Kind.METRIC:
            assert is_defined(code.text), f"{code.text} is not in serving/watch/definitions.py"
        elif code.kind is Kind.FILE and code.text.startswith("/tmp/"):
            self._find(code.text)
        elif code.kind is Kind.FILE and "/" in code.text[1:]:
            assert (ROOT / code.text).exists(), code.text
        elif code.kind is Kind.COMMAND:
            self._command(code.section, code.text)

    def all_were_run(self, page: list[Code]) -> None:
        commands = {code.text for code in page if code.kind is Kind.COMMAND}
        never = {command for command in commands - self._done if not self._why_not(command)}
        assert not never, f"no step runs {sorted(never)}"

    def _command(self, section: str, command: str) -> None:
        if reason := self._why_not(command):
            if command not in self._done:
                say(f"# not run: {command} ({reason})")
            self._done.add(command)
        elif step := self._steps.get((section, command)):
            say(f"# {section}")
            step(command)
        elif command not in self._done and command not in (DRAIN, KILL, "kedge serve CONFIG"):
            self._run(command)

    def _why_not(self, command: str) -> str | None:
        program = command.split()[0]
        if program == "dmesg" and subprocess.run(["dmesg"], capture_output=True, check=False).returncode:
            return "this user may not read the kernel's log"
        if program == "redis-cli" and not self._redis:
            return NEEDED[program]
        return NOT_RUN.get(command) or (NEEDED.get(program) if shutil.which(program) is None else None)

    def _run(self, command: str, status: int = 0) -> str:
        """Runs it in a shell, after what the page exports. Returns what it prints."""
        filled = self._fill(command)
        began_s = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", "\n".join(["set -o pipefail", *self._exports, filled])],
            cwd=ROOT,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60.0,
            check=False,
        )
        say(f"$ {filled}")
        for line in done.stdout.splitlines()[:SHOWN_LINES]:
            say(f"    {line[:SHOWN_WIDTH]}")
        say(f"    -> status {done.returncode}, {time.monotonic() - began_s:.1f} s")
        failed = done.returncode != status or done.stdout.startswith(("ERR", "(error)"))
        assert not failed, f"{command}: expected status {status}\n{done.stdout}"
        if filled.startswith("export "):
            self._exports.append(filled)
        if command == CONTROLLER and (found := re.search(r"^ +pid: (\d+)$", done.stdout, re.MULTILINE)):
            self._filled["PID"] = found[1]
        self._done.add(command)
        return done.stdout

    def _fill(self, text: str) -> str:
        with self._cluster.dashboard() as dashboard:
            filled = self._filled | {WRITTEN_DASHBOARD: str(dashboard.base_url).rstrip("/")}
        for name, value in filled.items():
            text = re.sub(
                rf"(?<!\w){re.escape(name)}(?!\w)" if name.isalnum() else re.escape(name), value, text
            )
        return text

    def _environment(self) -> dict[str, str]:
        """That of the user who started the cluster: RAY_AUTH_TOKEN stands for the token in the home directory."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KEDGE_"))
        }
        return environment | {
            "RAY_TMPDIR": str(self._cluster.directory),
            "RAY_AUTH_TOKEN": self._cluster.token,
            "PATH": f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }

    def _find(self, path: str) -> None:
        pattern = self._fill(path)
        found = list(Path("/").glob(pattern.lstrip("/")))
        assert found, f"no file {pattern}"
        say(f"# there is {pattern}")

    def _both_replicas(self) -> list[str]:
        eventually(lambda: len(self._cluster.replicas()) == 2, 120.0)
        return sorted(self._cluster.replicas())

    def _audit_of_a_leak(self, command: str) -> None:
        """The first audit has a leak, and the one after the drain has none."""
        if self._leaky:
            assert "not clean" not in self._run(command)
            return
        leak = self._cluster.plant("leak_page", for_s=600)
        self._leaky = self._filled["REPLICA"] = leak["replica_id"]
        told = self._run(command, status=1)
        assert f"{self._leaky}: page {leak['page']} of pool full is leaked" in told
        assert f"session {leak['session_id']}" in told
        assert self._cluster.logs(f"serve/*LLMReplica*{self._leaky}*"), "no log of that replica"

    def _info_without_the_leaky(self, command: str) -> None:
        eventually(lambda: self._leaky not in self._cluster.replicas(), 60.0)
        assert self._leaky not in self._run(command)

    def _sessions_with_an_orphan(self, command: str) -> None:
        self._both_replicas()
        self._cluster.chat("orphan")
        lost = self._cluster.plant("lose_session", session_id="orphan", for_s=600)
        self._filled["REPLICA"] = lost["replica_id"]
        assert "orphan" in self._run(command)

    def _kill_of_the_controller(self, command: str) -> None:
        """A turn waits for the log, goes on after the kill, and nothing is lost. The page has shown the process."""
        before = set(self._cluster.sessions())
        self._cluster.plant("fail_commits", for_s=600)
        with ThreadPoolExecutor(1) as pool:
            turn: Future[None] = pool.submit(self._cluster.chat, "waiting")
            eventually(lambda: any("a turn waits for the log" in text for text in self._replica_logs()), 30.0)
            self._run(command)
            turn.result(60.0)
        assert set(self._cluster.sessions()) == before | {"waiting"}

    def _replica_logs(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self._cluster.logs("serve/*LLMReplica*")]

    def _second_start(self, command: str) -> None:
        """The cluster is started again, from a shell with what the page exports, and sessions go on."""
        say(f"$ {self._fill(command)}")
        self._cluster.terminate()
        self._cluster.environment |= {"RAY_AUTH_MODE": "token", "KEDGE_API_KEY": KEY}
        self._cluster.environment |= dict.fromkeys(DASHBOARDS, WRITTEN_DASHBOARD)
        began_s = time.monotonic()
        self._cluster.start()
        say(f"    -> serves after {time.monotonic() - began_s:.1f} s")
        self._done.add(command)
        for name in DASHBOARDS:
            self._exports.append(self._fill(f"export {name}={WRITTEN_DASHBOARD}"))
        assert "waiting" in self._cluster.sessions()
        self._cluster.chat("waiting", "Are you there?")

    def _reason_of_a_death(self, command: str) -> None:
        victim, process = next((name, each["pid"]) for name, each in self._cluster.replicas().items())
        self._cluster.kill(process)
        eventually(lambda: victim not in self._cluster.replicas(), 60.0)
        told = self._run(command)
        assert f"#{victim}" in told
        assert "death_cause:" in told

    def _kill_of_a_hung_replica(self, command: str) -> None:
        hung = self._cluster.plant("stall_engine", for_s=600)["replica_id"]
        self._filled["PID"] = str(self._cluster.replicas()[hung]["pid"])
        self._run(command)
        eventually(lambda: hung not in self._cluster.replicas(), 60.0)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    page = code_of_the_page()
    programs = ("redis-server", "redis-sentinel", "redis-cli")
    redis = (RedisServer(), WatchedRedis(0)) if all(map(shutil.which, programs)) else None
    cluster = KeyedCluster()
    try:
        cluster.start()
        cluster.chat("first")
        walk = Walk(cluster, redis)
        for code in page:
            walk.take(code)
        walk.all_were_run(page)
        assert cluster.logs("serve/*Ingress*"), "no log of a front end"
    except AssertionError as error:
        sys.exit(f"docs/runbooks.md: {error}")
    finally:
        cluster.stop()
        for server in redis or ():
            server.stop()
    say("every command of docs/runbooks.md does what it says")


if __name__ == "__main__":
    main()
