"""What all models of settings have in common: a wrong key or a wrong type is refused, never guessed at."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Interval = Annotated[float, Field(ge=0.1)]
"""Seconds from one time that a process does something by itself to the next. If they are fewer, it does little else."""
NotEmpty = Annotated[str, Field(min_length=1)]
NAME_PATTERN = r"^[!-~]+$"
"""Names that clients give: visible ASCII, so that they can travel in a header."""
MAX_NAME_CHARS = 256
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=NAME_PATTERN)]


def yaml_off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


def matching(pattern: str, expected: str) -> AfterValidator:
    """For text that all of `pattern` matches. The error says in words what was `expected`, and nothing of the text: it
    may have a password."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{expected} was expected")
        return text

    return AfterValidator(check)


def is_name(text: str) -> bool:
    """Whether a client may give this name: what `Name` says, for text that no model checks."""
    return len(text) <= MAX_NAME_CHARS and re.fullmatch(NAME_PATTERN, text) is not None


_IN_WORDS = {
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
}
_NUMBERS = ("int_type", "int_from_float", "float_type", "bool_type")
_READ_AS: dict[type, str] = {str: "text", list: "a list", dict: "a mapping"}
MAX_SHOWN_CHARS = 40


class SettingsError(ValueError):
    """The settings cannot be used; the message names the key."""


class StrictModel(BaseModel):
    """A frozen model that refuses keys it does not know, by name, and values that are not of their key's type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def is_default(cls, name: str | None, value: Any) -> bool:
        """Whether the field has what it has unless it is set: a file may write that out."""
        return name is not None and bool(value == cls.model_fields[name].default)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = list(cls.model_fields)
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
        return values


def faults(error: ValidationError, *root: str) -> list[str]:
    """What is wrong with each key, which is named from `root` on."""
    return [f"{'.'.join((*root, *map(str, e['loc'])))}: {_reason(e)}" for e in error.errors()]


def _reason(error: Any) -> str:
    """pydantic puts "Value error, " before what a validator of ours has to say."""
    kind, found = error["type"], error["input"]
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME_PATTERN:
        return "use 1 to 256 visible ASCII characters, no spaces"
    if kind in _IN_WORDS:
        return f"{_IN_WORDS[kind]} was expected, not {_told(found, kind in _NUMBERS)}"
    return str(error["ctx"]["error"] if kind == "value_error" else error["msg"])


def _told(found: Any, in_place_of_a_number: bool) -> str:
    """What YAML has read. Only in place of a number or of true and false is text shown: elsewhere it may be a password
    or a key."""
    if found is None:
        return "nothing"
    if not in_place_of_a_number and type(found) in _READ_AS:
        return _READ_AS[type(found)]
    return repr(found)[:MAX_SHOWN_CHARS]
