"""A real GCS for tests. It is the part of a Ray cluster that `ray.init` calls first. Without a raylet it starts at
once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import ray
from ray._private import services
from ray._raylet import GCS_SERVER_PORT_NAME, wait_for_persisted_port

START_TIMEOUT_MS = 20_000
LOOPBACK = "127.0.0.1"
OWN = services.get_node_ip_address()
"""The machine's own address, or the loopback address where the machine has no network."""


class GcsServer:
    """A GCS that runs as soon as this is made, without tokens or with one. It listens as under `ray start
    --node-ip-address`: on the loopback alone, or on every interface."""

    def __init__(self, node_ip: str, token: str | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kg", dir="/tmp"))
        self.token = token
        node_id = ray.NodeID.from_random().hex()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if token is not None:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        command = [services.GCS_SERVER_EXECUTABLE, "--gcs_server_port=0", "--metrics-agent-port=0"]
        command += [f"--node-ip-address={node_ip}", f"--node-id={node_id}", "--session-name=session"]
        command += [
            f"--session-dir={self.directory}",
            f"--log_dir={self.directory}",
            "--config_list=e30=",
        ]  # base64 of {}
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.port: int = wait_for_persisted_port(
            str(self.directory), node_id, GCS_SERVER_PORT_NAME, timeout_ms=START_TIMEOUT_MS
        )

    def at(self, host: str) -> str:
        return f"{host}:{self.port}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.directory)
