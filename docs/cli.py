"""Writes the last part of docs/cli.md: every command with its options, from the code, by typer's own generator.

python docs/cli.py
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

from wrap import wrapped

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
BEGIN = "## Every option\n"
INTRODUCTION = f"{BEGIN}\n`python docs/cli.py` writes this part. `kedge COMMAND --help` prints the same.\n"
GENERATE = ["-m", "typer", "serving.cli.main", "utils", "docs", "--name", "kedge"]


def page(present: str) -> str:
    """The page with its last part written anew. What is before that part stays."""
    return wrapped(f"{present.split(BEGIN)[0]}{INTRODUCTION}\n{reference()}")


def reference() -> str:
    """The reference as Markdown, with headings one level below the page's."""
    done = subprocess.run(
        [sys.executable, *GENERATE],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    text = html.unescape(done.stdout)
    text = re.sub(r"\A# `kedge`\n.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\* `--help`: Show this message and exit\.\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*Options\*\*:\n\n(?=\Z|#)", "", text, flags=re.MULTILINE)
    return re.sub(r"^#", "##", text, flags=re.MULTILINE).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
