"""A real Redis for tests, on a socket file of its own. The test chooses by options whether it keeps every write or
nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest
import redis

from controllers.settings import RedisLogSettings

PROGRAM = shutil.which("redis-server")
START_TIMEOUT_S = 20.0
CLUSTER = "cluster"
"""The name of the only cluster that writes, where a test needs no other."""


class RedisServer:
    """A Redis that runs as soon as this is made. Skips the test where Redis is not installed."""

    def __init__(self, *options: str) -> None:
        if PROGRAM is None:
            pytest.skip("redis-server is not installed")
        self.directory = Path(tempfile.mkdtemp(prefix="kr", dir="/tmp"))  # sockets need a short path
        self.url = f"unix://{self.directory}/redis.sock"
        self._command = [PROGRAM, "--port", "0", "--unixsocket", f"{self.directory}/redis.sock"]
        self._command += ["--dir", str(self.directory), "--save", "", *options]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server ended")

    def log(self, name: str | None = None) -> RedisLogSettings:
        """Settings for a log. Without `name` nobody has used the log before."""
        return RedisLogSettings(self.url, name or uuid.uuid4().hex)

    def client(self) -> redis.Redis:
        """A client that looks into Redis past the store."""
        return redis.Redis.from_url(self.url)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)
