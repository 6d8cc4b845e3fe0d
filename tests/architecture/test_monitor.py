"""`make monitor` starts a real Prometheus and says so in one line. The dashboards agree with their description."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from source_tree import ROOT
from test_monitoring import MONITORING, is_served, metrics_in

sys.path.insert(0, str(MONITORING / "grafana"))

from boards import BOARDS
from write_boards import expression, path_of, text_of

MONITOR = MONITORING / "monitor.py"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's package)"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def targets(port: int) -> list[dict[str, str]]:
    """The targets that Prometheus scrapes. It finds them a moment after it is ready."""
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=10.0) as reply:
            found: list[dict[str, str]] = json.load(reply)["data"]["activeTargets"]
        if found:
            return found
        time.sleep(0.1)
    return []


@needs_prometheus
def test_one_line_says_where_it_is_and_the_rules_are_loaded(tmp_path: Path) -> None:
    port = free_port()
    options = ["--prometheus-port", str(port), "--data", str(tmp_path), "--kedge", "127.0.0.1:9"]
    path = f"{Path(shutil.which('prometheus') or '').parent}"
    monitor = subprocess.Popen(
        [sys.executable, str(MONITOR), *options], stdout=subprocess.PIPE, env={"PATH": path}, text=True
    )
    try:
        assert monitor.stdout is not None
        line = monitor.stdout.readline()
        assert line.startswith(
            f"Watching http://127.0.0.1:9: Prometheus at http://127.0.0.1:{port}, its alerts"
        )
        alerts_page = re.findall(r"its alerts at (\S+);", line)
        with urllib.request.urlopen(alerts_page[0], timeout=10.0) as reply:
            assert reply.status == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=10.0) as reply:
            groups = json.load(reply)["data"]["groups"]
        assert any(rule["name"] == "KedgeLeakedPages" for group in groups for rule in group["rules"])
        (target,) = targets(port)
        assert target["scrapeUrl"] == "http://127.0.0.1:9/metrics"
    finally:
        monitor.send_signal(signal.SIGINT)
        assert monitor.wait(20.0) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5.0)


@pytest.mark.parametrize("given", ["http://127.0.0.1:8000", "127.0.0.1", "127.0.0.1:8000/metrics"])
def test_a_kedge_that_is_not_a_host_and_a_port_is_refused_by_name(given: str) -> None:
    """Prometheus refused it only in its own log."""
    done = subprocess.run([sys.executable, str(MONITOR), "--kedge", given], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"argument --kedge: '{given}' is not host:port, for example 127.0.0.1:8000" in done.stderr


def test_without_prometheus_a_sentence_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(MONITOR)],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Prometheus is not installed: `apt-get install prometheus`")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_grafana_is_given_its_source_and_boards(tmp_path: Path) -> None:
    """Grafana gets them through environment variables. A stand-in for Grafana writes down what it gets."""
    told = tmp_path / "told"
    grafana = tmp_path / "grafana"
    grafana.write_text(f"#!/bin/sh\nenv > {told}\n")
    grafana.chmod(0o755)
    sys.path.insert(0, str(MONITORING))
    import monitor

    process = monitor.start_grafana([str(grafana), "server"], "http://127.0.0.1:1", 3, tmp_path)
    assert process.wait(20.0) == 0
    environment = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
    provisioning = Path(environment["GF_PATHS_PROVISIONING"])
    for file in ("datasources/kedge.yml", "dashboards/kedge.yml"):
        for name in re.findall(r"\$\{(\w+)\}", (provisioning / file).read_text()):
            assert environment[name]
    assert Path(environment["KEDGE_BOARDS"]).is_dir()
    assert Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert os.environ.keys() <= environment.keys() | {"_", "PWD", "SHLVL", "OLDPWD"}


def test_the_boards_are_as_their_description_says() -> None:
    """`python configs/monitoring/grafana/write_boards.py` writes the dashboards."""
    assert {path_of(board) for board in BOARDS} == set((MONITORING / "grafana" / "dashboards").glob("*.json"))
    for board in BOARDS:
        assert path_of(board).read_text() == text_of(board), f"{board.uid}: write_boards.py was not run"


def test_every_panel_has_its_own_place_and_served_metrics() -> None:
    for board in BOARDS:
        panels = json.loads(text_of(board))["panels"]
        places = [tuple(panel["gridPos"][key] for key in ("x", "y")) for panel in panels]
        assert len(set(places)) == len(places)
        for row in board.rows:
            for panel in row.panels:
                for query in panel.queries:
                    text = expression(query)
                    assert {name for name in metrics_in(text) if not is_served(name)} == set(), panel.title
                    assert "@" not in text


def test_the_folder_has_nothing_of_this_machine() -> None:
    for path in (MONITORING / "grafana").rglob("*.json"):
        assert str(ROOT) not in path.read_text()
