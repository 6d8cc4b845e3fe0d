"""A Redis master, its replicas and a Sentinel for tests. All are real processes on loopback ports of their own."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from controllers.settings import RedisLogSettings

SERVER, SENTINEL = shutil.which("redis-server"), shutil.which("redis-sentinel")
SERVICE = "kedge-master"
SILENCE_MS = 5000
"""After this silence the Sentinel takes the master for dead. With half a second, on a busy machine, the Sentinel once
replaced the master while another replica was still copying. It then made that replica the next master, and all data was
lost. A Sentinel that was held up for two seconds does nothing for thirty ("tilt"), and then takes no replica that was
without its master for ten times the silence: with two seconds, never one again."""
LONGEST_S = 120.0
"""How long servers may take to find each other or to agree on a master: over a Sentinel's thirty seconds of doing
nothing."""


def free_ports(count: int) -> list[int]:
    """Free ports below the ephemeral ports of the system and above those of Ray's workers, so that nobody takes them
    later: neither a connection nor a server of another test."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            probe, port = held.enter_context(socket.socket()), random.randrange(20_000, 30_000)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found


class WatchedRedis:
    """A master, its replicas and a Sentinel that needs no other's consent. They run as soon as this is made. `servers`
    is by port, the master first.

    Skips the test where Redis is not installed.
    """

    def __init__(self, replicas: int) -> None:
        if SERVER is None or SENTINEL is None:
            pytest.skip("redis-server and redis-sentinel are not installed")
        self._directory = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        self._processes: list[subprocess.Popen[str]] = []
        master, *others, self._sentinel_port = free_ports(replicas + 2)
        self.servers = {master: self._server(master)}
        self.servers |= {port: self._server(port, "--replicaof", f"127.0.0.1 {master}") for port in others}
        config = self._directory / "sentinel.conf"
        config.write_text(
            f"port {self._sentinel_port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {SILENCE_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self._start([SENTINEL, str(config)], "+monitor master")
        self._until(lambda: len(self._sentinel().sentinel_slaves(SERVICE)) == replicas)
        for port in others:
            self._until(lambda port=port: self._follows(port))

    def log(self, wait_replicas: int) -> RedisLogSettings:
        url = f"redis+sentinel://127.0.0.1:{self._sentinel_port}/{SERVICE}"
        return RedisLogSettings(url, "log", wait_replicas, 900)

    def master(self) -> int:
        """The port of the server that the Sentinel names as master."""
        state = self._sentinel().sentinel_masters()[SERVICE]
        return int(state["port"])

    def kill(self, port: int) -> None:
        self.servers[port].kill()
        self.servers[port].wait()

    def pause(self, port: int) -> None:
        self.servers[port].send_signal(signal.SIGSTOP)

    def go_on(self, port: int) -> None:
        """Resumes a paused server. Returns once it is a replica of the new master and has that master's data."""
        self.servers[port].send_signal(signal.SIGCONT)
        self._until(lambda: self._follows(port))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self._directory)

    def _server(self, port: int, *options: str) -> subprocess.Popen[str]:
        assert SERVER is not None
        folder = self._directory / str(port)
        folder.mkdir()
        fixed = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        return self._start(
            [SERVER, *fixed, "--repl-diskless-sync-delay", "0", *options], "ready to accept connections"
        )

    def _start(self, command: list[str], ready: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if ready in line.lower():
                return process
        raise AssertionError(f"{command[0]} ended")

    def _follows(self, port: int) -> bool:
        """Whether the server is a replica that is in sync with its master."""
        with redis.Redis(port=port) as client:
            replication: dict[str, object] = client.info("replication")
        return replication.get("master_link_status") == "up"

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LONGEST_S
        while not holds():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def _sentinel(self) -> redis.Redis:
        return redis.Redis(port=self._sentinel_port)
