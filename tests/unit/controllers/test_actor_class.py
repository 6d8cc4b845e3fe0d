"""The Ray class of the controller's actor, as a process of another version loads it."""

from __future__ import annotations

import os
import pickletools
import subprocess
import sys
from pathlib import Path

import ray
from ray import cloudpickle

from controllers.cluster_actor import ClusterController, class_kept_whole

ROOT = Path(__file__).resolve().parents[3]
NAMED_ELSEWHERE = {
    "controllers.cluster_actor",
    "controllers.cluster",
    "controllers.deployments",
    "controllers.open_store",
}
"""The modules that the class refers to, its own included. The version before must have all of them, so nobody may add
one that it lacks."""

LOAD = """
import inspect
import pickle
import sys
from controllers.cluster_actor import ClusterController
assert not hasattr(ClusterController, "heartbeat"), "this is this version's module"
actor_class = pickle.load(sys.stdin.buffer)
inspect.signature(inspect.unwrap(actor_class.heartbeat)).bind("self", "status", [])
"""


def class_as_ray_keeps_it() -> bytes:
    with class_kept_whole():
        return bytes(cloudpickle.dumps(ray.remote(ClusterController).__ray_metadata__.modified_class))


def test_the_actors_class_loads_where_its_methods_are_unknown(tmp_path: Path) -> None:
    """The class used not to load there. Ray then used a stand-in whose methods take no positional arguments, and every
    call by a replica or front end of the version before was a TypeError."""
    package = tmp_path / "controllers"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'controllers')!r})\n")
    (package / "cluster_actor.py").write_text("class ClusterController:\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        input=class_as_ray_keeps_it(),
        capture_output=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_actors_class_names_only_what_the_version_before_has() -> None:
    told = {
        argument
        for _, argument, _ in pickletools.genops(class_as_ray_keeps_it())
        if isinstance(argument, str)
    }
    ours = {name for name in told if name.partition(".")[0] in ("controllers", "serving", "engine", "cache")}
    assert ours - {"controllers"} == NAMED_ELSEWHERE
