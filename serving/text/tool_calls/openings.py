"""How calls begin in each format: what is certain to be there before the name of a function is whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.text.tool_calls.formats import (
    FormatName,
    JsonCallFormat,
    NamedFormat,
    PythonicFormat,
    TaggedFormat,
    tool_format,
)

MOST_BLANKS = 16
"""The most characters of white space where white space is allowed."""
BLANKS = b"[ \\t\\r\\n]{0,%d}" % MOST_BLANKS
CHANNEL, START = "<|channel|>", "<|start|>"
TO_FUNCTIONS = "to=functions."


@dataclass(frozen=True, slots=True)
class CallOpening:
    """`marks` are texts that calls begin with, each followed by a match of one of `followers`. In a `bare` format, a
    call at the beginning of the answer needs no mark: `bare` matches it, with NAMES in place of the functions' names,
    and `first_bytes` are those that it may begin with."""

    marks: tuple[str, ...]
    followers: tuple[tuple[bytes, ...], ...]
    bare: bytes = b""
    first_bytes: bytes = b""

    def behind(self, mark: str) -> tuple[bytes, ...]:
        return self.followers[self.marks.index(mark)]

    def first(self, names: Sequence[bytes]) -> bytes | None:
        return self.bare.replace(b"NAMES", b"|".join(map(re.escape, names))) if self.bare else None


def opening_of(name: FormatName) -> CallOpening:
    """If a model may also mention the mark in plain text, more than the mark must be there."""
    if name == "gpt_oss":
        to = re.escape(TO_FUNCTIONS).encode()
        return CallOpening(
            (CHANNEL, START),
            ((BLANKS + rb"\w{1,32}" + BLANKS + to,), (BLANKS + b"(?:assistant)?" + BLANKS + to,)),
            bare=BLANKS + to,
            first_bytes=b"t",
        )
    match tool_format(name):
        case NamedFormat() as form:
            return CallOpening((named_mark(form),), ((b"",),))
        case TaggedFormat() as form:
            if form.name_opener:
                return CallOpening((form.name_opener,), ((b"",),))
            return CallOpening((form.call_opener,), ((BLANKS + rb"[\w.\-:/]",),))
        case PythonicFormat() as form:
            first = b"[ \\t\\r\\n]*\\[" + BLANKS + rb"(?:NAMES)\("
            return CallOpening((form.opener,), ((BLANKS + rb"\[" + BLANKS + rb"[\w.\-:/]",),), first, b"[")
        case JsonCallFormat(bare=True) as form:
            blank = b"[ \\t\\r\\n]*"
            name_key = blank.join((rb"\{", b'"name"', b":", b'"(?:NAMES)"'))
            filler = b"(?:%s[%s])?" % (blank, re.escape(form.filler).encode())
            firsts = b"{" + form.filler.encode()
            return CallOpening((form.opener,), ((BLANKS + rb"\{",),), filler + blank + name_key, firsts)
        case form:
            group = b"(?:\\[%s)?" % BLANKS if "[" in form.filler else b""
            return CallOpening((form.opener,), ((BLANKS + group + rb"\{",),))


def named_mark(form: NamedFormat) -> str:
    """What a call begins with: a token, if the format has one for that."""
    tokens = (token for token in form.shown_tokens if form.call_opener.startswith(token))
    return next(tokens, form.call_opener)
