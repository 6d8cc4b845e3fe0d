"""Where commands print their tables: on a terminal, or into a file or another program, where no line is broken."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

WIDEST = 10_000
"""Characters of a line where there is no terminal: more than any row of a table has."""


def output(**options: Any) -> Console:
    """Standard output, for tables. Without a terminal a line is as long as it has to be, unless COLUMNS says
    otherwise. `options` are Console's."""
    console = Console(**options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDEST
    return console
