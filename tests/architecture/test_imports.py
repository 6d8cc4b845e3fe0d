"""Imports point one way, heavy libraries stay in their packages, and modules hold no shared state."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

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
API = "serving.front.api."
API_FOLDER = "serving/front/api/"
SHARED_BY_PROTOCOLS = "answers"
"""The one folder there that is no protocol."""
PUTS_PROTOCOLS_TOGETHER = {"serving/front/http.py", "serving/front/ingress.py"}
REDIS_FILES = ("controllers/session_log/redis_connection.py", "controllers/session_log/redis_log.py")
SESSION_LOG = "controllers/session_log/"
BELOW_THE_SESSION_LOG = {
    f"controllers.{name}" for name in ("errors", "records", "session_keys", "settings", "tokens")
}
CIPHER_FILES = {"controllers/session_log/log_cipher.py"}
CUDA_FILES = {"engine/device.py", "engine/runner/graphs.py"}
HTTP_LIBRARIES = {"fastapi", "starlette", "httpx", "uvicorn", "aiohttp"}


def test_packages_import_only_what_is_below_them() -> None:
    wrong = {
        source.name: ours - ALLOWED[source.package]
        for source in sources(*PACKAGES)
        if not (ours := _libraries(source) & set(PACKAGES)) <= ALLOWED[source.package]
    }
    assert not wrong


def test_front_ends_and_replicas_meet_on_the_wire_only() -> None:
    """Neither of the two imports the other, and a package that both import imports neither."""
    for source in sources("serving"):
        rooms = {name for name in source.imports() if name.startswith(ROOMS_APART)}
        here = source.name.replace("/", ".")
        if here.count(".") > 2:
            assert not {name for name in rooms if name.split(".")[1] != here.split(".")[1]}, source.name


def test_protocols_import_no_other_protocol() -> None:
    """And what they share imports none."""
    folders = [source.name.split("/") for source in sources("serving") if source.name.startswith(API_FOLDER)]
    protocols = {parts[3] for parts in folders if len(parts) > 4} - {SHARED_BY_PROTOCOLS}
    assert {"openai", "responses", "messages", "sessions"} <= protocols
    for source in sources("serving"):
        names = [name.removeprefix(API) for name in _modules(source) if name.startswith(API)]
        imported = {name.split(".")[0] for name in names} & protocols
        if source.name.startswith(API_FOLDER):
            assert imported <= {source.name.split("/")[3]}, source.name
        else:
            assert not imported or source.name in PUTS_PROTOCOLS_TOGETHER, source.name


def test_the_session_log_knows_records_and_rules_only() -> None:
    """It stores what it is told. Who owns a session and which replicas there are is decided above it."""
    for source in sources("controllers"):
        if source.name.startswith(SESSION_LOG):
            imported = {name for name in source.imports() if name.startswith("controllers.")}
            elsewhere = {name for name in imported if not name.startswith(SESSION_LOG.replace("/", "."))}
            assert elsewhere <= BELOW_THE_SESSION_LOG, source.name


def test_protocols_know_no_ray_and_only_plain_data_of_the_engine() -> None:
    for source in sources("serving"):
        if source.name.startswith(API_FOLDER):
            imported = set(source.imports())
            assert "ray" not in _libraries(source), source.name
            assert {name for name in imported if name.startswith("engine")} <= {"engine.api"}, source.name


def test_cache_and_controllers_need_no_library_but_numpy() -> None:
    for source in sources(*STANDARD_LIBRARY_AND_NUMPY):
        allowed = {*sys.stdlib_module_names, *PACKAGES, "numpy"}
        if source.name in RAY_OUTSIDE_SERVING:
            allowed.add("ray")
        if source.name in REDIS_FILES:
            allowed.add("redis")
        if source.name in CIPHER_FILES:
            allowed.add("cryptography")
        assert not _libraries(source) - allowed, source.name


def test_ray_only_in_serving_and_the_cluster_actor() -> None:
    users = {
        source.name for source in sources("cache", "controllers", "engine") if "ray" in _libraries(source)
    }
    assert users == RAY_OUTSIDE_SERVING


def test_no_circles() -> None:
    """No module imports itself by way of others. Imports inside functions count too."""
    modules = {source.name.removesuffix(".py").replace("/", "."): source for source in sources(*PACKAGES)}
    imported = {name: modules.keys() & set(_modules(source)) - {name} for name, source in modules.items()}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the modules of the circle


def test_http_only_in_serving() -> None:
    for source in sources("cache", "controllers", "engine"):
        assert not HTTP_LIBRARIES & _libraries(source), source.name


def test_cuda_is_named_in_two_files_only() -> None:
    for source in sources(*PACKAGES):
        if source.name in CUDA_FILES:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == "cuda":
                value = node.value
                assert not (isinstance(value, ast.Name) and value.id == "torch"), (
                    f"{source.name}:{node.lineno}"
                )
        assert not any(name.startswith("torch.cuda") for name in source.imports()), source.name


def test_no_module_state() -> None:
    """No `global`, no file that collects unrelated helpers, and only constants (upper case) as module-level
    containers."""
    for source in sources(*PACKAGES):
        assert source.name.rsplit("/", 1)[-1] not in {"utils.py", "helpers.py", "common.py", "misc.py"}
        for node in ast.walk(source.tree):
            assert not isinstance(node, ast.Global), f"{source.name}:{node.lineno}: global"
        for statement in source.tree.body:
            variables = _shared_variables(statement)
            assert not variables, f"{source.name}:{statement.lineno}: {variables} can be changed by anybody"


def _libraries(source: Source) -> set[str]:
    """The top-level names of what it imports."""
    return {name.split(".")[0] for name in source.imports()}


def _shared_variables(statement: ast.stmt) -> list[str]:
    """Names that the statement, at module level, gives to a container or to what a call makes."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call) and _makes_no_state(value):
        return []
    if not isinstance(value, ast.List | ast.Dict | ast.Set | ast.Call):
        return []
    return sorted(name for name in _assigned_names(statement) - {"__all__"} if not name.isupper())


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
