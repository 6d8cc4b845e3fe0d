"""Controllers and callers of two versions in one Ray cluster. Each process loads Ray's class of the actor from its own
code.

A version is a folder with its own `controllers/cluster_actor.py`, which comes first on the path of its processes.
Everything else is this version's.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from controllers.cluster_actor import get_or_create_controller, version_of
from controllers.records import ReplicaStatus
from controllers.settings import ClusterSettings, Deployment, LogSettings, SqliteLogSettings
from controllers.wire_record import FIRST_VERSION, WIRE_VERSION
from serving.wire.controller_calls import NAMESPACE, announce_at_deploy
from serving.wire.shard_calls import ShardCalls

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).resolve().parents[2]
DRIVER_TIMEOUT_S = 60.0
CALLS_TIMEOUT_S = 60.0

PACKAGE = f"__path__.append({str(ROOT / 'controllers')!r})\n"
VERSION_1 = """
class ClusterController:
    def __init__(self):
        self.announced = []

    async def announce(self, deployment):
        self.announced.append(deployment.deployment_id)

    async def register_replica(self, status):
        raise RuntimeError("the controller of version 1 was asked")

    async def sessions(self):
        return []
"""
REMOVED_SINCE = """
    async def method_that_is_no_more(self, replica_id):
        return 1
"""

CREATE = """
import sys
import ray
from controllers.cluster_actor import ClusterController
address, name, namespace, path = sys.argv[1:]
ray.init(address, namespace=namespace, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
options = {"name": name, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
controller = ray.remote(ClusterController).options(**options).remote()
assert ray.get(controller.sessions.remote()) == []
"""
CALL = """
import sys
import ray
from controllers.cluster_actor import ClusterController
from controllers.records import ReplicaStatus
assert not hasattr(ClusterController, "version"), "this is no driver of version 1"
address, name, namespace, path = sys.argv[1:]
ray.init(address, namespace=namespace, log_to_driver=False)
controller = ray.get_actor(name)
ray.get(controller.register_replica.remote(ReplicaStatus("of version 1", 1000, 1000)))
owner = ray.get(controller.open_session.remote("s", "", None, None, "key"))
assert owner.replica_id == "of version 1", owner
ray.get(controller.report_unreachable.remote(owner.replica_id, True))
assert ray.get(controller.replicas.remote()) == []
"""


@pytest.fixture(
    params=[VERSION_1, VERSION_1 + REMOVED_SINCE], ids=["all methods known", "a method removed since"]
)
def version_1(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "version_1"
    package = folder / "controllers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "cluster_actor.py").write_text(request.param)
    return folder


def run_driver(code: str, folder: Path, name: str) -> None:
    """Runs `code` in a process of the version in `folder`, outside the repository, because Ray puts a driver's folder
    on the workers' paths."""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", code, address, name, NAMESPACE, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def create(name: str, log: LogSettings) -> ActorHandle:
    return get_or_create_controller(name, NAMESPACE, ClusterSettings(replica_timeout_s=60.0), log)


async def version_at(name: str) -> int:
    return await version_of(ray.get_actor(name, namespace=NAMESPACE))


def test_a_controller_of_version_1_hears_of_the_deployment_and_is_replaced(
    version_1: Path, tmp_path: Path
) -> None:
    """The handle of the old controller has the methods of this version's class, and calls of them fail. Where a method
    of version 1 has been removed, the handle's methods take no positional arguments."""
    name = tmp_path.name
    log = SqliteLogSettings(str(tmp_path / "sessions.db"))
    deployment = Deployment("new", ClusterSettings(), log)
    run_driver(CREATE, version_1, name)
    old = ray.get_actor(name, namespace=NAMESPACE)
    assert asyncio.run(version_at(name)) == FIRST_VERSION

    announce_at_deploy(name, deployment)
    assert ray.get(old.__ray_call__.remote(fn=lambda actor: actor.announced)) == ["new"]

    async def meet() -> list[ReplicaStatus]:
        front_end, replica = (
            ShardCalls(lambda: create(name, log), timeout_s=CALLS_TIMEOUT_S, deployment=deployment)
            for _ in range(2)
        )
        await asyncio.gather(
            front_end.sessions(None, None, 1), replica.announce(), replica.measures(), replica.measures()
        )
        await replica.register_replica(ReplicaStatus("a", 1000, 1000))
        return await front_end.replicas()

    (status,) = asyncio.run(meet())
    assert status.replica_id == "a"
    assert asyncio.run(version_at(name)) == WIRE_VERSION
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def test_callers_of_version_1_reach_the_controller(version_1: Path, tmp_path: Path) -> None:
    """Ray must be able to load the actor's class where some of its methods are unknown, and the class must have what
    version 1 calls."""
    name = tmp_path.name
    controller = create(name, SqliteLogSettings(str(tmp_path / "sessions.db")))
    assert ray.get(controller.sessions.remote()) == []
    run_driver(CALL, version_1, name)
    (entry,) = ray.get(controller.sessions.remote())
    assert entry.session_id == "s"
    ray.kill(controller)
