"""`kedge drain` names the replica that it asks to drain, and reports what comes of it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from serving.cli.main import app

DRAINING = b'{"replica_id": "a/b", "state": "draining"}'
UNKNOWN = b'{"error": {"message": "There is no replica \'z\'."}}'


class Server(BaseHTTPRequestHandler):
    """A server that knows only replica "a/b"."""

    def do_POST(self) -> None:
        known = self.path == "/v1/kedge/replicas/a%2Fb/drain"
        body = DRAINING if known else UNKNOWN
        self.send_response(202 if known else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Keeps the log out of the test's output."""


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_says_that_the_replica_drains(url: str) -> None:
    result = CliRunner().invoke(app, ["drain", "a/b", "--url", url])
    assert result.exit_code == 0, result.output
    assert "a/b drains" in result.output


def test_a_refusal_is_told_in_one_line(url: str) -> None:
    result = CliRunner().invoke(app, ["drain", "z", "--url", url])
    assert result.exit_code != 0
    assert "There is no replica 'z'." in result.output


def test_for_programs_it_is_what_the_server_says(url: str) -> None:
    result = CliRunner().invoke(app, ["drain", "a/b", "--url", url, "--json"])
    assert (result.exit_code, json.loads(result.output)) == (0, {"replica_id": "a/b", "state": "draining"})
