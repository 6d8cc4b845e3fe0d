"""The formats in which models write function calls, as data. In all of them a call is a JSON object with a name."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

FormatName = Literal["hermes", "llama3", "mistral"]
ToolCallsSetting = Literal["auto", "off", "hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What a model that keeps to the format writes is `prefix`, calls with `between` between them, and `suffix`.

    To be read as calls it takes less: `opener`, before the first of them or before each, and, behind them or behind
    each, `closer`. `filler` are characters that may stand around them, beside white space. A `bare` format also takes a
    call without an opener, where an answer begins with it. `arguments` is the key of a call's arguments.
    """

    arguments: Literal["arguments", "parameters"]
    prefix: str
    between: str
    suffix: str
    opener: str
    closer: str = ""
    filler: str = ""
    bare: bool = False


FORMATS = MappingProxyType(
    {
        "hermes": ToolFormat(
            arguments="arguments",
            prefix="<tool_call>\n",
            between="\n</tool_call>\n<tool_call>\n",
            suffix="\n</tool_call>",
            opener="<tool_call>",
            closer="</tool_call>",
        ),
        "llama3": ToolFormat(
            arguments="parameters",
            prefix="",
            between="; ",
            suffix="",
            opener="<|python_tag|>",
            filler=";",
            bare=True,
        ),
        "mistral": ToolFormat(
            arguments="arguments",
            prefix="[TOOL_CALLS][",
            between=", ",
            suffix="]",
            opener="[TOOL_CALLS]",
            closer="]",
            filler="[,",
        ),
    }
)


def format_of(template: str) -> FormatName | None:
    """The format that a chat template teaches; None if it teaches none, or one that is not known here."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        # Others write tags inside these tags.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        # Later ones write `name[ARGS]{...}`.
        return None if "[ARGS]" in template else "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None
