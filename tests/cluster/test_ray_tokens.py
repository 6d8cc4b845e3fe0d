"""The Ray cluster that `kedge serve` starts does nothing for callers without its token."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray._private.services import RAYLET_EXECUTABLE
from served_cluster import APPLICATIONS, ServedCluster

from serving.cli.start.ray_cluster import answers


def gcs_address(cluster: ServedCluster) -> str:
    (raylet,) = cluster.pids(RAYLET_EXECUTABLE)
    arguments = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    (address,) = (argument for argument in arguments if argument.startswith("--gcs-address="))
    return address.partition("=")[2]


def test_the_gcs_asks_for_the_token(cluster: ServedCluster) -> None:
    address = gcs_address(cluster)
    assert not answers(address)
    assert not answers(address, "0123456789abcdef")
    assert answers(address, cluster.token)


@pytest.mark.parametrize("authorization", ["", "Bearer 0123456789abcdef"])
def test_the_dashboard_asks_for_the_token(cluster: ServedCluster, authorization: str) -> None:
    with cluster.dashboard(authorization=authorization) as stranger:
        replies = [stranger.get(APPLICATIONS), stranger.delete(APPLICATIONS)]
    assert {reply.status_code for reply in replies} <= {401, 403}
    assert cluster.application()["status"] == "RUNNING"
