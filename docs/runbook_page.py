"""What docs/runbooks.md names, section by section: its commands, metrics, settings and files.

All code of the page must be of a known kind. What is not ends the reader by name, so that nothing new goes unchecked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from markdown_it import MarkdownIt
from transcripts import commands_of

from serving.watch.definitions import DEFINITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "runbooks.md"
PROGRAMS = {
    *("curl", "df", "dmesg", "export", "kedge", "kill", "make", "nvidia-smi", "python"),
    *("ray", "redis-cli", "serve"),
}
METRIC = re.compile(r"kedge_\w+")
FILE = re.compile(r"/tmp/\S+|configs/\S+|\.\w+(/\w+)*|/\w+")
SETTING = re.compile(r"^### `([\w.]+)`", re.MULTILINE)
WORDS = {
    *("RAY_AUTH_MODE", "RAY_worker_niceness=0", "$KEDGE_HOME", "unix:///path"),
    *("ClusterController", "Ingress", "LLMReplica", "num_replicas", "state", "pid", "death_cause"),
    *(
        "no_replica",
        "too_many_losses",
        "doubly accounted",
        "missing",
        "stale",
        "untold",
        "kv",
        "replica ...: died",
        "unreachable",
    ),
    *("cluster", "outcome", "route", 'cause="lost"', "refused", "error", "unavailable", "store_failed"),
}
"""Other names that stand in the page: variables, names of Ray's, fields, labels and their values."""


class Kind(StrEnum):
    COMMAND = "command"
    METRIC = "metric"
    SETTING = "setting"
    FILE = "file"
    WORD = "word"


@dataclass(frozen=True)
class Code:
    """A piece of code. `section` is the heading that it is under, "" above the first."""

    section: str
    kind: Kind
    text: str


def read(text: str, settings: set[str]) -> Iterator[Code]:
    """All code of the page in its order: lines of console blocks after `$ `, and what is in backticks."""
    section = ""
    tokens = MarkdownIt().parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and (before.type, before.tag) == ("heading_open", "h2"):
            section = token.content
        if token.type == "fence":
            for command in commands_of(token.content):
                yield Code(section, Kind.COMMAND, command)
        for child in token.children or ():
            if child.type == "code_inline":
                code = " ".join(child.content.split())
                yield Code(section, kind_of(code, settings), code)


def kind_of(code: str, settings: set[str]) -> Kind:
    if code.split()[0] in PROGRAMS:
        return Kind.COMMAND
    if METRIC.fullmatch(code):
        return Kind.METRIC
    name = code.split(":")[0]
    if name in settings or any(known.endswith(f".{name}") for known in settings):
        return Kind.SETTING
    if code in WORDS:
        return Kind.WORD
    if FILE.fullmatch(code):
        return Kind.FILE
    sys.exit(
        f"docs/runbooks.md has `{code}`, which is no command, metric, setting or file that is known here"
    )


def code_of_the_page() -> list[Code]:
    settings = set(SETTING.findall((ROOT / "docs" / "settings.md").read_text()))
    return list(read(PAGE.read_text(), settings))


def is_defined(metric: str) -> bool:
    return metric in DEFINITIONS or metric in {each.shown for each in DEFINITIONS.values()}
