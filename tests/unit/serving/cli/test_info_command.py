"""`kedge info` against the real service over real HTTP, and with replies that only a whole cluster gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from serving.cli.client.server import ServerError
from serving.cli.client.server_facts import gather_facts
from serving.cli.main import app
from serving.settings.config import check_file
from tests.unit.serving.replica_rig import REPLICA_ID
from tests.unit.serving.served_service import served_service

CONFIG = Path(__file__).parents[4] / "configs" / "cluster.yaml"


def info(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["info", "--url", url, *options], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_a_server_that_is_not_kedge_is_said_to_be_none() -> None:
    other = httpx.MockTransport(lambda _: httpx.Response(200, json={"name": "another"}))
    with (
        httpx.Client(transport=other, base_url="http://other") as client,
        pytest.raises(ServerError, match="is not Kedge"),
    ):
        gather_facts(client)


def test_it_tells_what_runs(tmp_path: Path) -> None:
    with served_service(tmp_path) as served:
        result, told = info(served.address), info(served.address, "--json")
    assert result.exit_code == 0, result.output
    assert f"kedge     {version('kedge')} at {served.address}, healthy" in result.output
    assert "model     null-model, a context of 512 tokens" in result.output
    (row,) = (line for line in result.output.splitlines() if line.startswith(REPLICA_ID))
    assert row.split()[1:5] == ["up", "0", "0", "0"]
    document = json.loads(told.output)
    assert set(document) == {
        "url",
        "version",
        "healthy",
        "models",
        "proxy",
        "ingresses",
        "replicas",
        "limits",
        "note",
    }
    (replica,) = document["replicas"]
    assert (replica["replica_id"], replica["state"]) == (REPLICA_ID, "up")
    assert replica["pools"]["full"]["total"] == 256
    assert document["limits"]["context_len"] == 512


class Cluster(BaseHTTPRequestHandler):
    """A server with fixed `replies`: a status and a body for each path."""

    replies: dict[str, tuple[int, Any]]

    def do_GET(self) -> None:
        status, reply = self.replies.get(self.path, (404, {"error": {"message": "nothing there"}}))
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Keeps the log out of the test's output."""


REPLIES: dict[str, tuple[int, Any]] = {
    "/version": (200, {"version": "1.2"}),
    "/health": (200, {"status": "ok"}),
    "/v1/models": (
        200,
        {"data": [{"id": "m", "max_model_len": 4096}, {"id": "gpt"}, {"id": "pirate", "parent": "m"}]},
    ),
}


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with `REPLIES` and the test's own replies. Yields its address."""
    handler = type("Handler", (Cluster,), {"replies": REPLIES | request.param})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PAGES = {"total": 100, "free": 50, "cached": 25, "protected": 0, "session": 25, "in_flight": 0, "leaked": 0}
REPLICA = {
    "replica_id": "a",
    "state": "draining",
    "sessions": 1234,
    "running": 2,
    "waiting": 3,
    "pages": PAGES,
    "page_size_bytes": 1_000_000,
    "window_pages": PAGES,
    "window_page_size_bytes": 1000,
    "host": {"budget_bytes": 2**30, "used_bytes": 2**20, "sessions": 1},
    "disk": {"budget_bytes": 2**30, "used_bytes": 0, "sessions": 0},
    "execution": {"device": "cpu"},
}
SETTINGS = check_file(str(CONFIG))[0].model_dump(mode="json")
SETTINGS["tenants"]["max_sessions"] = 12
WHOLE = {
    "/get_server_info": (
        200,
        {
            "settings": SETTINGS,
            "replicas": [REPLICA],
            "ingresses": [{"ingress_id": "i", "pid": 1, "tasks": 2, "proxy": "haproxy"}],
            "controller": {},
        },
    )
}


@pytest.mark.parametrize("cluster", [WHOLE], indirect=True)
def test_a_whole_cluster_fits_one_screen(cluster: str) -> None:
    result = info(cluster)
    for line in (
        "model     m, a context of 4,096 tokens, also called gpt",
        "adapters  pirate",
        "front     1 front end behind HAProxy",
        "limits    each replica: 64 turns that run, 1,024 that wait",
        "          100,000 sessions, which end after 1 h 00 min idle",
        "          each tenant: 12 sessions",
    ):
        assert line in result.output.splitlines()
    assert len(result.output.splitlines()) < 24
    first, second = (line for line in result.output.splitlines() if "25%" in line)
    assert first.split()[:8] == ["a", "draining", "1,234", "2", "3", "full", "95.4", "MiB"]
    assert second.split()[:3] == ["window", "97.7", "KiB"]
    assert json.loads(info(cluster, "--json").output)["proxy"] == "haproxy"


@pytest.mark.parametrize("cluster", [WHOLE], indirect=True)
def test_a_single_pool_is_not_said_to_be_full(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty pool of `size_mib: 256` was shown as `full, 268.4 MB`."""
    one = {**REPLICA, "window_pages": None, "pages": {**PAGES, "free": 100, "cached": 0}}
    one["page_size_bytes"] = 256 * 2**20 // PAGES["total"]
    monkeypatch.setitem(WHOLE["/get_server_info"][1], "replicas", [one])
    (row,) = (line for line in info(cluster).output.splitlines() if line.startswith("a "))
    assert row.split()[5:8] == ["256.0", "MiB", "0%"]


REFUSED = {"/get_server_info": (403, {"error": {"message": "for operators"}}), "/health": (503, {})}


@pytest.mark.parametrize("cluster", [REFUSED], indirect=True)
def test_who_is_no_operator_learns_the_rest(cluster: str) -> None:
    result = info(cluster)
    assert result.exit_code == 0
    assert "NOT healthy" in result.output
    assert "replicas, pools and limits are for operators (403: for operators)" in result.output
    document = json.loads(info(cluster, "--json").output)
    assert (document["replicas"], document["ingresses"], document["healthy"]) == (None, None, False)


@pytest.mark.parametrize("cluster", [{"/version": (404, {})}], indirect=True)
def test_another_server_is_refused(cluster: str) -> None:
    result = info(cluster)
    assert result.exit_code == 1
    assert result.output.startswith("kedge info: 404")
