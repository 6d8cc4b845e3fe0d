"""The formats in which models write function calls, as data: JSON objects with a name, or names before JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

FormatName = Literal["hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "mistral_v11"]
ToolCallsSetting = Literal[
    "auto", "off", "hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "mistral_v11"
]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls that are JSON objects. What a model that keeps to the format writes is `prefix`, calls with `between`
    between them, and `suffix`.

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

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Those that may be special tokens."""
        return tuple(filter(None, (self.opener, self.closer)))

    def head(self, function: str) -> str:
        """What a call has before its arguments."""
        return f'{{"name": {json.dumps(function)}, "{self.arguments}": '

    @property
    def tail(self) -> str:
        """What it has behind them."""
        return "}"


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """Calls that are a name, `separator` and a JSON object, between `call_opener` and `tail`. What a model that keeps
    to the format writes is `prefix`, calls with `between` between them, and `suffix`. `shown_tokens` are those that may
    be special tokens."""

    call_opener: str
    separator: str
    tail: str = ""
    prefix: str = ""
    between: str = ""
    suffix: str = ""
    shown_tokens: tuple[str, ...] = ()

    def head(self, function: str) -> str:
        """What a call has before its arguments."""
        return f"{self.call_opener}{function}{self.separator}"


_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

NAMED_FORMATS: Mapping[FormatName, NamedFormat] = MappingProxyType(
    {
        "deepseek_v3": NamedFormat(
            prefix="<｜tool▁calls▁begin｜>",
            call_opener="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            separator="\n```json\n",
            tail="\n```<｜tool▁call▁end｜>",
            between="\n",
            suffix="<｜tool▁calls▁end｜>",
            shown_tokens=_DEEPSEEK_TOKENS,
        ),
        "deepseek_v31": NamedFormat(
            prefix="<｜tool▁calls▁begin｜>",
            call_opener="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            tail="<｜tool▁call▁end｜>",
            suffix="<｜tool▁calls▁end｜>",
            shown_tokens=_DEEPSEEK_TOKENS,
        ),
        "mistral_v11": NamedFormat(
            call_opener="[TOOL_CALLS]", separator="[ARGS]", shown_tokens=("[TOOL_CALLS]", "[ARGS]")
        ),
    }
)

FORMATS: Mapping[FormatName, ToolFormat] = MappingProxyType(
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


def tool_format(name: FormatName) -> ToolFormat | NamedFormat:
    """The format of that name."""
    return NAMED_FORMATS[name] if name in NAMED_FORMATS else FORMATS[name]


def format_of(template: str) -> FormatName | None:
    """The format that a chat template teaches; None if it teaches none, or one that is not known here."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        # Others write tags inside these tags.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None
