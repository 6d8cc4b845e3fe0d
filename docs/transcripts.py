"""Runs the console examples of the documents against a server and writes down what they really print.

    python docs/transcripts.py --url http://127.0.0.1:8000 README.md docs/api.md docs/api/*.md

An example is a console block right after the comment `<!-- transcript -->`. Its commands (lines after "$ ", continued
after a backslash or inside single quotes) run in one shell; everything else in the block is replaced by their output.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

WRITTEN_URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"(<!-- transcript -->\n```console\n)(.*?)(```\n)", re.DOTALL)
END = "--- end of output, status "


def commands_of(block: str) -> list[str]:
    """The commands of a console block, with their continuation lines."""
    commands: list[str] = []
    continued = False
    for line in block.splitlines():
        if continued:
            commands[-1] += f"\n{line}"
        elif line.startswith("$ "):
            commands.append(line[2:])
        else:
            continue
        continued = line.endswith("\\") or commands[-1].count("'") % 2 == 1
    return commands


def run_all(commands: list[str], url: str) -> list[str]:
    """What each command prints. All run in one shell; the first that fails ends the program."""
    script = "".join(f'{command}\nstatus=$?; echo; echo "{END}$status"\n' for command in commands)
    done = subprocess.run(
        ["bash"],
        input="set -o pipefail\n" + script.replace(WRITTEN_URL, url),
        env={**os.environ, "KEDGE_URL": url, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    *outputs, _ = re.split(rf"\n{END}(?:\d+)\n", f"{done.stdout}\n")
    statuses = re.findall(rf"{END}(\d+)", done.stdout)
    for command, status in zip(commands, statuses, strict=True):
        if status != "0":
            sys.exit(f"status {status} of: {command}\n{done.stdout}")
    return [
        re.sub(r" +$", "", output.replace(url, WRITTEN_URL).strip("\n"), flags=re.M) for output in outputs
    ]


def refreshed(text: str, url: str) -> str:
    """The document with the output of every example replaced."""

    def refresh(match: re.Match[str]) -> str:
        commands = commands_of(match[2])
        parts = []
        for command, output in zip(commands, run_all(commands, url), strict=True):
            parts.append(f"$ {command}\n")
            parts.append(f"{output}\n" if output else "")
        return match[1] + "".join(parts) + match[3]

    return BLOCK.sub(refresh, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=WRITTEN_URL)
    parser.add_argument("documents", type=Path, nargs="+")
    arguments = parser.parse_args()
    for path in arguments.documents:
        path.write_text(refreshed(path.read_text(), arguments.url))


if __name__ == "__main__":
    main()
