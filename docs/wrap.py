"""Breaks the lines of documents where they fit a screen. Tables, code, headings and comments stay as they are.

python docs/wrap.py docs/security.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 110
FIXED = re.compile(r"\||#|<|\[[^\]]+\]: |    |$")
"""Begins a line that stays: of a table, a heading, HTML, the target of a link, code, or nothing."""
BEFORE_A_MARK = re.compile(r" (?=(?:\d+[.)]|[-+*>|]|#+)(?: |$))")
GLUE = "\0"
"""In place of the blank before what would be a mark at the beginning of a line."""
ITEM = re.compile(r"( *)([-*] |\d+\. )?")


def wrapped(text: str) -> str:
    """The document, each paragraph and each item of a list broken anew."""
    return "".join(f"{line}\n" for line in _lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    paragraph: list[str] = []
    fenced = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        fixed = fenced or fence or FIXED.match(line)
        if paragraph and (fixed or _begins_item(line)):
            yield from _broken(paragraph)
            paragraph = []
        if fixed:
            yield line
        else:
            paragraph.append(line)
        fenced ^= fence
    yield from _broken(paragraph)


def _begins_item(line: str) -> bool:
    match = ITEM.match(line)
    return match is not None and match[2] is not None


def _broken(paragraph: list[str]) -> list[str]:
    """As many lines as it takes; those after an item's first are below its text."""
    if not paragraph:
        return []
    match = ITEM.match(paragraph[0])
    assert match is not None
    first = match[0]
    words = " ".join(line.strip() for line in [paragraph[0][len(first) :], *paragraph[1:]])
    lines = textwrap.wrap(
        BEFORE_A_MARK.sub(GLUE, words),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        document = Path(name)
        document.write_text(wrapped(document.read_text()))
