"""Python literals in text that arrives in pieces: where one ends, and what it is as JSON."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NoReturn

_MARKS = re.compile(r"""["'\\{}\[\](),]""")
_STRING_OR_WORD = re.compile(r'"(?:[^"\\]|\\.?)*"?|\b(?:True|False|None)\b', re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_LITERAL_CHARS = 65_536


class ArgumentExtent:
    """Finds where an argument of a call ends. The argument need not be valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The place of the comma or bracket after it; None if that has not come yet."""
        place = 1 if self._escaped else 0
        self._escaped = False
        while mark := _MARKS.search(text, place):
            place, char = mark.end(), mark[0]
            if self._quote:
                if char == "\\":
                    self._escaped = place == len(text)
                    place += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif self._depth:
                self._depth -= char in ")]}"
            elif char in ",)]":
                return mark.start()
        return None


def literal_json(text: str) -> str:
    """A whole argument as JSON. Text that is JSON except for Python's words is kept as it is written, numbers of any
    size included. Text that is neither kind of literal is a string."""
    text = text.strip()
    in_json = _STRING_OR_WORD.sub(lambda found: _WORDS.get(found[0], found[0]), text)
    try:
        json.loads(in_json, parse_constant=_refuse, parse_int=str, parse_float=str)
        return in_json
    except (ValueError, RecursionError):
        pass
    # A string over several lines is not valid in Python, but models may write it.
    for spelling in (text, text.replace("\r", "\\r").replace("\n", "\\n")):
        try:
            return _json_of(python_value(spelling))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return _json_of(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def python_value(text: str) -> Any:
    """Raises what `ast.literal_eval` does."""
    if len(text) > _MAX_LITERAL_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape sequence that Python does not know stays as it is
        return ast.literal_eval(text)


def _json_of(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        shown.encode()
    except UnicodeEncodeError:  # halves of characters, which only an escape sequence can express
        return json.dumps(value, allow_nan=False)
    return shown
