"""Imports point one way, heavy libraries stay in their packages, and modules hold no shared state."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
from source_tree import PACKAGES, Source, sources

ALLOWED = {
    "cache": {"cache"},
    "controllers": {"controllers"},
    "engine": {"cache", "engine"},
    "serving": {"cache", "controllers", "engine", "serving"},
}
STANDARD_LIBRARY_AND_NUMPY = ("cache", "controllers")
RAY_OUTSIDE_SERVING = {"controllers/cluster_actor.py"}
ROOMS_APART = ("serving.front", "serving.replica")
REDIS_FILES = ("controllers/redis_connection.py", "controllers/redis_log.py")
CIPHER_FILES = {"controllers/log_cipher.py"}
CUDA_FILES = {"engine/device.py", "engine/runner/graphs.py"}
HTTP_LIBRARIES = {"fastapi", "starlette", "httpx", "uvicorn", "aiohttp"}

every_file = pytest.mark.parametrize("source", sources(*PACKAGES), ids=lambda source: source.name)
every_plain_file = pytest.mark.parametrize(
    "source", sources(*STANDARD_LIBRARY_AND_NUMPY), ids=lambda source: source.name
)


@every_file
def test_packages_import_only_what_is_below_them(source: Source) -> None:
    ours = {name.split(".")[0] for name in source.imports()} & set(PACKAGES)
    assert ours <= ALLOWED[source.package], f"{source.name} imports {sorted(ours - ALLOWED[source.package])}"


@every_file
def test_front_ends_and_replicas_meet_on_the_wire_only(source: Source) -> None:
    """Neither of the two imports the other, and a package that both import imports neither."""
    rooms = {name for name in source.imports() if name.startswith(ROOMS_APART)}
    here = source.name.replace("/", ".")
    if here.startswith("serving.") and here.count(".") > 2:
        assert not {name for name in rooms if name.split(".")[1] != here.split(".")[1]}, source.name


@every_plain_file
def test_cache_and_controllers_need_no_library_but_numpy(source: Source) -> None:
    allowed = {*sys.stdlib_module_names, *PACKAGES, "numpy"}
    if source.name in RAY_OUTSIDE_SERVING:
        allowed.add("ray")
    if source.name in REDIS_FILES:
        allowed.add("redis")
    if source.name in CIPHER_FILES:
        allowed.add("cryptography")
    libraries = {name.split(".")[0] for name in source.imports()} - allowed
    assert not libraries, f"{source.name} imports {sorted(libraries)}"


@every_file
def test_ray_only_in_serving_and_the_cluster_actor(source: Source) -> None:
    if source.package == "serving" or source.name in RAY_OUTSIDE_SERVING:
        return
    assert "ray" not in {name.split(".")[0] for name in source.imports()}


def test_no_circles() -> None:
    """No module imports itself by way of others. Imports inside functions count too."""
    modules = {source.name.removesuffix(".py").replace("/", "."): source for source in sources(*PACKAGES)}
    imported = {name: modules.keys() & set(_modules(source)) - {name} for name, source in modules.items()}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the modules of the circle


@every_file
def test_http_only_in_serving(source: Source) -> None:
    if source.package == "serving":
        return
    assert not HTTP_LIBRARIES & {name.split(".")[0] for name in source.imports()}


@every_file
def test_cuda_is_named_in_two_files_only(source: Source) -> None:
    if source.name in CUDA_FILES:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            value = node.value
            assert not (isinstance(value, ast.Name) and value.id == "torch"), f"{source.name}:{node.lineno}"
    assert not any(name.startswith("torch.cuda") for name in source.imports()), source.name


@every_file
def test_no_module_state(source: Source) -> None:
    """No `global`, no file that collects unrelated helpers, and only constants (upper case) as module-level
    containers."""
    assert source.name.rsplit("/", 1)[-1] not in {"utils.py", "helpers.py", "common.py", "misc.py"}
    for node in ast.walk(source.tree):
        assert not isinstance(node, ast.Global), f"{source.name}:{node.lineno}: global"
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        names = _assigned_names(node)
        variables = sorted(name for name in names - {"__all__"} if not name.isupper())
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.Call) and variables:
            allowed = isinstance(value, ast.Call) and _makes_no_state(value)
            assert allowed, f"{source.name}:{node.lineno}: {variables} can be changed by anybody"


def _modules(source: Source) -> Iterator[str]:
    """The names of possible modules: `from a import b` gives `a`, and `a.b` in case b is a module."""
    yield from source.imports()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _makes_no_state(call: ast.Call) -> bool:
    """Whether the result of this call may have a lower-case name at module level: loggers, type variables, routers."""
    function = ast.unparse(call.func).rsplit(".", 1)[-1]
    return function in {"getLogger", "TypeVar", "NewType", "APIRouter", "Typer", "Console"}


def _assigned_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()
