"""The end of `kedge serve` on SIGTERM. It is the shared cluster's, so this file is its last."""

from __future__ import annotations

from served_cluster import ServedCluster, eventually


def test_sigterm_ends_the_cluster_cleanly(shared_cluster: ServedCluster) -> None:
    """Ray's own handler of SIGTERM prints a stack and aborts `kedge serve`."""
    shared_cluster.start_unless_it_runs()
    assert shared_cluster.pids("")
    assert shared_cluster.terminate() == 0, shared_cluster.log_text()
    eventually(lambda: not shared_cluster.pids(""), 30)
