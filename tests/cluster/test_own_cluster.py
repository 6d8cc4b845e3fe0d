"""`kedge serve` on an existing Ray cluster, as docs/operations/cluster.md describes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_cluster import ROOT, ServedCluster, eventually, free_port
from session_client import Conversation

from serving.cli.start.errors import StartError
from serving.cli.start.ray_cluster import answers

TIMEOUT_S = 60.0
RAY = str(Path(sys.executable).with_name("ray"))


def is_there(address: str, token: str) -> bool:
    try:
        return answers(address, token)
    except StartError:
        return False


@pytest.fixture
def served() -> Iterator[ServedCluster]:
    """A cluster that is not started yet. Its Ray cluster runs, started by a user whose home directory has the token."""
    served = ServedCluster(ROOT / "configs" / "cluster.yaml")
    home = tempfile.mkdtemp(prefix="kd", dir="/tmp")  # Ray's sockets need a short path
    served.environment = {"HOME": home, "RAY_AUTH_MODE": "token"}
    environment = os.environ | served.environment | {"RAY_TMPDIR": home, "PYTHONPATH": str(ROOT)}
    generate = [RAY, "get-auth-token", "--generate"]
    made = subprocess.run(generate, env=environment, check=True, capture_output=True, text=True)
    served.token = made.stdout.strip()
    address = f"127.0.0.1:{free_port()}"
    served.options = ["--address", address]
    start = [RAY, "start", "--head", "--block", f"--port={address.partition(':')[2]}"]
    with Path(home, "log").open("wb") as log:
        head = subprocess.Popen(
            [*start, f"--dashboard-port={free_port()}"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        eventually(lambda: is_there(address, served.token), TIMEOUT_S)
        yield served
    finally:
        served.stop()
        os.killpg(head.pid, signal.SIGKILL)  # a stop on request first drains the node for half a minute
        head.wait(TIMEOUT_S)
        shutil.rmtree(home, ignore_errors=True)  # the last of its processes may still be writing


def test_turns_on_a_cluster_that_was_there(served: ServedCluster) -> None:
    served.start()
    with served.client() as client:
        session = Conversation.open(client)
        session.turn([400, 401, 402])
        session.exact_turn([405])
        session.close()
