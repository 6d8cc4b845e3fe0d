"""Which modules are imported where: torch and transformers take seconds and hundreds of MiB in each process."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    "module", ["serving.app", "serving.front.ingress", "controllers.cluster_actor", "serving.cli.main"]
)
def test_only_who_computes_loads_torch(module: str) -> None:
    """The task that builds the application used to load it, and a cluster's start waited for that."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {*HEAVY} & {*loaded.stdout.split()}
