"""Which modules are imported where: torch and transformers take seconds and hundreds of MiB in each process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray import cloudpickle
from ray.serve.deployment import Application

from serving.app import build

HEAVY = ("torch", "transformers")
MODULES = (
    "controllers.cluster_actor",
    "serving.cli.main",
    "serving.front.ingress",
    "serving.app",
    "tests.cluster.null_app",
)
"""Imported one after another, in one process."""
IMPORTS = """
import sys
from importlib import import_module

for name in sys.argv[1:]:
    import_module(name)
    print(*sys.modules)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """What the process has loaded once it has imported each of MODULES."""
    told = subprocess.run(
        [sys.executable, "-c", IMPORTS, *MODULES], capture_output=True, text=True, check=True
    )
    return dict(zip(MODULES, (set(line.split()) for line in told.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_only_who_computes_loads_torch(module: str, loaded: dict[str, set[str]]) -> None:
    """The task that builds the application used to load it, and a cluster's start waited for that."""
    assert module in loaded[module]
    assert not {*HEAVY} & loaded[module]


def test_nothing_of_opentelemetry_is_loaded_where_nothing_is_traced(loaded: dict[str, set[str]]) -> None:
    """This means OTLP's exporter and what it needs. Ray itself loads other parts of OpenTelemetry."""
    modules = loaded["serving.app"]
    assert {"serving.front.ingress", "serving.replica.turn_runner"} <= modules
    assert not [
        name for name in modules if name.startswith(("opentelemetry.exporter.otlp", "serving.trace.spans"))
    ]


def test_nothing_of_planted_faults_is_loaded_where_they_are_off(loaded: dict[str, set[str]]) -> None:
    modules = loaded["serving.app"]
    assert {"serving.front.ingress", "serving.replica.replica"} <= modules
    assert not {m for m in modules if m.endswith(("_faults", "api.debug", "fault_calls", "debug.kinds"))}


def test_a_replica_loads_no_front_end() -> None:
    """Its engine's factory was in serving.app, which Ray's worker imported to find it, and with it all of the API."""
    application = build({"model": {"path": "assets/models/kedge-chat"}})
    (replicas,) = (arg for arg in application._bound_deployment.init_args if isinstance(arg, Application))
    sent = cloudpickle.dumps((replicas._bound_deployment.func_or_class, replicas._bound_deployment.init_args))
    program = "import sys; from ray import cloudpickle; cloudpickle.loads(sys.stdin.buffer.read()); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    modules = told.stdout.decode().split()
    assert "serving.replica.replica" in modules
    assert not [name for name in modules if name.startswith(("serving.front", "serving.app", *HEAVY))]
