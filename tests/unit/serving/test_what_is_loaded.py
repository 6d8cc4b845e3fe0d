"""Which modules are imported where: torch and transformers take seconds and hundreds of MiB in each process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray import cloudpickle
from ray.serve.deployment import Application

from serving.app import build

HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        "serving.app",
        "serving.front.ingress",
        "controllers.cluster_actor",
        "serving.cli.main",
        "tests.cluster.null_app",
    ],
)
def test_only_who_computes_loads_torch(module: str) -> None:
    """The task that builds the application used to load it, and a cluster's start waited for that."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {*HEAVY} & {*loaded.stdout.split()}


def test_a_replica_loads_no_front_end() -> None:
    """Its engine's factory was in serving.app, which Ray's worker imported to find it, and with it all of the API."""
    application = build({"model": {"path": "assets/models/kedge-chat"}})
    (replicas,) = (arg for arg in application._bound_deployment.init_args if isinstance(arg, Application))
    sent = cloudpickle.dumps((replicas._bound_deployment.func_or_class, replicas._bound_deployment.init_args))
    program = "import sys; from ray import cloudpickle; cloudpickle.loads(sys.stdin.buffer.read()); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    modules = loaded.stdout.decode().split()
    assert "serving.replica.replica" in modules
    assert not [name for name in modules if name.startswith(("serving.front", "serving.app", *HEAVY))]
