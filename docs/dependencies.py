"""Writes the tables of docs/dependencies.md: what the locks pin, and the licence that each package declares.

    python docs/dependencies.py

pip is asked for the metadata of every pin, also of those that this platform does without; nothing is installed, but an
index that has no metadata apart costs the download of the wheels. What a table has in its column "for" stays.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
LOCKS = {
    "brought along": ROOT / "requirements.lock",
    "CUDA": ROOT / "requirements-cuda.lock",
    "tools": ROOT / "requirements-dev.lock",
    "documentation": ROOT / "requirements-docs.lock",
}
"""By the name of the table that lists them; what pyproject.toml asks for itself is in the table "asked for"."""

PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^\s;]+)", re.MULTILINE)
TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n\n)((?:\|.*\n)+)")
MOST_OF_A_LICENCE = 60
"""Characters: what is longer is the licence's text, not its name."""


def pins(lock: Path) -> dict[str, str]:
    """Versions by package."""
    return dict(PIN.findall(lock.read_text()))


def asked_for() -> set[str]:
    """Names of the packages that pyproject.toml wants at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {package(requirement) for requirement in project["dependencies"]}


def tables() -> dict[str, dict[str, str]]:
    """Versions by package, by table."""
    direct = asked_for()
    found = {table: pins(lock) for table, lock in LOCKS.items()}
    runtime = found["brought along"]
    found["brought along"] = {name: version for name, version in runtime.items() if name not in direct}
    found["documentation"] = {
        name: version for name, version in found["documentation"].items() if name not in runtime
    }
    return {"asked for": {name: runtime[name] for name in sorted(direct)}, **found}


def rows(page: str) -> dict[str, list[list[str]]]:
    """The cells of each row, by table, without its head."""
    return {
        name: [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]
        for _, name, lines in TABLE.findall(page)
    }


def licence(metadata: Mapping[str, Any]) -> str:
    """What the package declares: an SPDX expression, or as it words it."""
    declared = (metadata.get("license") or "").strip()
    classified = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get("classifier", [])
        if classifier.startswith("License ::")
    ]
    is_a_name = declared and "\n" not in declared and len(declared) <= MOST_OF_A_LICENCE
    found = metadata.get("license_expression") or (declared if is_a_name else ", ".join(classified))
    return str(found or "not declared").replace("|", "/")


def refreshed(page: str, licences: Mapping[str, str]) -> str:
    """The page with its tables written anew."""
    reasons = {row[0]: row[3] for row in rows(page).get("asked for", [])}
    wanted = tables()

    def written(table: re.Match[str]) -> str:
        head = "\n".join(table[3].splitlines()[:2])
        lines = [
            "| " + " | ".join(cells) + " |"
            for cells in _cells(wanted[table[2]], licences, reasons if table[2] == "asked for" else None)
        ]
        return "\n".join([table[1] + head, *lines, ""])

    return TABLE.sub(written, page)


def _cells(
    versions: Mapping[str, str], licences: Mapping[str, str], reasons: Mapping[str, str] | None
) -> Iterator[list[str]]:
    for name, version in sorted(versions.items()):
        yield [name, version, licences[name], *([] if reasons is None else [reasons.get(name, "?")])]


def ask_index(wanted: Mapping[str, str]) -> dict[str, str]:
    """The licence of each package, by pip."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--ignore-requires-python"]  # some are for other versions of Python, or other platforms
    command += ["--quiet", "--report", "-", *(f"{name}==={version}" for name, version in wanted.items())]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found = (entry["metadata"] for entry in report["install"])
    return {package(metadata["name"]): licence(metadata) for metadata in found}


def package(requirement: str) -> str:
    """Of a requirement, as locks write it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[._-]+", "-", match[0]).lower()


if __name__ == "__main__":
    wanted = {name: version for table in tables().values() for name, version in table.items()}
    PAGE.write_text(refreshed(PAGE.read_text(), ask_index(wanted)))
