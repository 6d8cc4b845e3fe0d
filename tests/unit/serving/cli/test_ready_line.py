"""`kedge serve` prints one line once the server answers, and keeps nobody waiting. In place of `serve run` a script
serves what the ready line's check asks for."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from gcs_server import OWN, GcsServer
from started_kedge import start_kedge

from serving.cli.start.readiness import expected_of
from serving.cli.start.ready_line import line
from serving.settings.config import parse_args
from serving.settings.settings_file import ServeFile

CONFIG = Path(__file__).parents[4] / "configs" / "cluster.yaml"
WAIT_S = 30.0
SERVE_RUN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        replicas = min(2, server.asked // 2)
        server.asked += self.path == "/get_server_info"
        known = {replies}
        status, reply = known.get(self.path, (404, {{}}))
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...

def main(arguments, prog_name):
    global server
    if {answers}:
        server = HTTPServer(("127.0.0.1", {port}), Handler)
        server.asked = 0
        server.serve_forever()
    sys.exit(7)
"""
REPLICAS = "{'/health': (200, {}), '/get_server_info': (200, {'replicas': [{}] * replicas})}"
KEYS = "{'/health': (200, {}), '/get_server_info': (401, {})}"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def serving(
    directory: Path, port: int, *options: str, replies: str = REPLICAS, answers: bool = True
) -> Iterator[subprocess.Popen[str]]:
    script = SERVE_RUN.format(port=port, replies=replies, answers=answers)
    document = yaml.safe_load(CONFIG.read_text())
    document["http_options"] = {"host": "0.0.0.0", "port": port}
    config = directory / "cluster.yaml"
    config.write_text(yaml.safe_dump(document))
    process = start_kedge(directory, script, [str(config), *options])
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_it_waits_for_all_replicas(tmp_path: Path, port: int) -> None:
    with serving(tmp_path, port) as process:
        said = first_line(process)
        assert process.poll() is None, "it goes on"
        process.terminate()
        process.wait(WAIT_S)
        assert process.stdout is not None
        assert process.stdout.read() == "", "one line, and who said it is gone"
    assert said.startswith(f"kedge is ready at http://127.0.0.1:{port}: model kedge-chat, 2 replicas, after ")
    assert said.endswith(" s")


def test_for_programs(tmp_path: Path, port: int) -> None:
    with serving(tmp_path, port, "--json") as process:
        told = json.loads(first_line(process))
    assert told.pop("seconds") > 0
    assert told == {
        "event": "ready",
        "url": f"http://127.0.0.1:{port}",
        "model": "kedge-chat",
        "replicas": 2,
        "replicas_asked": 2,
    }


def test_without_an_operators_key_it_tells_what_was_asked_for(tmp_path: Path, port: int) -> None:
    with serving(tmp_path, port, replies=KEYS) as process:
        assert "2 replicas, after " in first_line(process)


def test_a_serve_run_that_ends_leaves_nobody_waiting(tmp_path: Path, port: int) -> None:
    with serving(tmp_path, port, answers=False) as process:
        output, _ = process.communicate(timeout=WAIT_S)  # until nobody can write there any more
    assert (process.returncode, output) == (7, "")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a Ray cluster that is there already."""
    server = GcsServer(OWN)
    yield server.at(OWN)
    server.stop()


def test_where_somebody_answers_already_no_line_would_be_true(
    tmp_path: Path, port: int, cluster: str
) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    with serving(tmp_path / "before", port) as before:
        first_line(before)
        there = ("--address", cluster, "--allow-no-token")
        with serving(tmp_path / "after", port, *there, answers=False) as process:
            output, errors = process.communicate(timeout=WAIT_S)
    assert output == ""
    assert f"http://127.0.0.1:{port} answers already" in errors


ARGS = {"model": {"path": "assets/models/kedge-chat", "name": "chat"}}


@pytest.mark.parametrize(
    ("host", "port", "prefix", "args", "url", "operators_url", "replicas"),
    [
        ("0.0.0.0", 8000, "/", {}, "http://127.0.0.1:8000", "http://127.0.0.1:8000", 2),
        ("::1", 81, "/llm", {}, "http://[::1]:81/llm", "http://[::1]:81/llm", 2),
        (
            "10.1.1.1",
            8000,
            "/",
            {"ingress": {"operator_port": 8001}, "replicas": {"autoscaling": {"max_replicas": 4}}},
            "http://10.1.1.1:8000",
            "http://127.0.0.1:8001",
            1,
        ),
    ],
)
def test_what_is_expected(
    host: str, port: int, prefix: str, args, url: str, operators_url: str, replicas: int
) -> None:
    file = ServeFile([], prefix, host, port)
    expected = expected_of(file, parse_args(ARGS | args), 0.0, as_json=False)
    assert (expected.url, expected.operators_url) == (url, operators_url)
    assert (expected.model, expected.replicas) == ("chat", replicas)


@pytest.mark.parametrize(
    ("replicas", "asked", "said"), [(1, 2, "1 of 2 replicas"), (1, 1, "1 replica,"), (3, 2, "3 replicas")]
)
def test_the_line_counts(replicas: int, asked: int, said: str) -> None:
    expected = {"url": "u", "model": "m", "replicas": asked, "as_json": False}
    assert said in line(expected, replicas, 1.0)
