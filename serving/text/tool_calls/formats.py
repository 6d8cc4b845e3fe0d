"""The formats in which models write function calls, as data: JSON objects with a name, names before JSON objects, names
before tags around each argument, or Python calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from serving.text.reasoning.formats import HARMONY_TOKENS

FormatName = Literal[
    "hermes",
    "llama3",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "mistral_v11",
    "mistral_call_id",
    "qwen3_coder",
    "glm45",
    "glm47",
    "gpt_oss",
    "pythonic",
]
ToolCallsSetting = Literal["auto", "off", FormatName]

_LINE_BEFORE_KEY = re.compile(r"(\n|\\n)\s*<arg_key>")
_LIST_OF_PYTHON_CALLS = re.compile(r"\[\w+\(\w+=\w")


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """Calls that are JSON objects. A model that follows the format writes `prefix`, calls with `between` between them,
    and `suffix`.

    Reading calls needs less: `opener`, before the first call or before each, and `closer`, after the calls or after
    each. `filler` are characters that may stand around calls, besides white space. A `bare` format also accepts a call
    without an opener at the beginning of an answer. `arguments` is the key of a call's arguments.
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
        """Marks that may be special tokens."""
        return tuple(filter(None, (self.opener, self.closer)))

    def head(self, function: str) -> str:
        """The text of a call before its arguments."""
        return f'{{"name": {json.dumps(function)}, "{self.arguments}": '

    @property
    def tail(self) -> str:
        """The text of a call after its arguments."""
        return "}"


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """Calls that are a name, `separator` and a JSON object, between `call_opener` and `tail`. A model that follows the
    format writes `prefix`, calls with `between` between them, and `suffix`. If there is an `id_opener`, it and the
    call's id, nine letters and digits, come before the separator. With `one_call` an answer has at most one call.
    `shown_tokens` are marks that may be special tokens."""

    call_opener: str
    separator: str
    id_opener: str = ""
    tail: str = ""
    prefix: str = ""
    between: str = ""
    suffix: str = ""
    one_call: bool = False
    shown_tokens: tuple[str, ...] = ()

    def head(self, function: str) -> str:
        """The text of a call without an id before its arguments."""
        return f"{self.call_opener}{function}{self.separator}"


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Calls that are a name and tags around the key and the value of each argument. A string value is written as it is,
    any other as JSON. A format with a `string_opener` marks strings by putting it before them. A model that follows the
    format ends parts with `line_end`, and puts `value_frame` around each value.

    `inner_tokens` are parts of marks that may be special tokens; without them whole marks may be.
    """

    call_opener: str
    call_closer: str
    key_opener: str
    key_closer: str
    value_closer: str
    value_opener: str = ""
    string_opener: str = ""
    name_opener: str = ""
    name_closer: str = ""
    function_closer: str = ""
    line_end: str = ""
    value_frame: str = ""
    prefix: str = ""
    suffix: str = ""
    inner_tokens: tuple[str, ...] = ()

    @property
    def between(self) -> str:
        return self.line_end

    @property
    def tail(self) -> str:
        """The text of a call after its arguments."""
        end = f"{self.function_closer}{self.line_end}" if self.function_closer else ""
        return f"{end}{self.call_closer}"

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Marks, or parts of them, that may be special tokens."""
        if self.inner_tokens:
            return self.inner_tokens
        marks = (self.call_opener, self.call_closer, self.key_opener, self.key_closer)
        return (*marks, *filter(None, (self.value_opener,)), self.value_closer)

    def head(self, function: str) -> str:
        """The text of a call before its arguments."""
        opener = f"{self.line_end}{self.name_opener}" if self.name_opener else ""
        return f"{self.call_opener}{opener}{function}{self.name_closer}{self.line_end}"

    def before_value(self, *, is_string: bool) -> str:
        """The text of an argument between its key and its value."""
        if self.string_opener:
            opener = self.string_opener if is_string else self.value_opener
        else:
            opener = f"{self.line_end}{self.value_opener}" if self.value_opener else ""
        return f"{self.key_closer}{opener}{self.value_frame}"

    @property
    def behind_value(self) -> str:
        return f"{self.value_frame}{self.value_closer}{self.line_end}"


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """A list of Python calls, with literals as keyword arguments. A model that follows the format writes `prefix`,
    calls with `between` between them, and `suffix`. The list is at the beginning of an answer, or between `opener` and
    `closer`."""

    opener: str
    closer: str
    prefix: str = "["
    between: str = ", "
    suffix: str = "]"
    tail: str = ")"

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        return (self.opener, self.closer)

    def head(self, function: str) -> str:
        """The text of a call before its arguments."""
        return f"{function}("


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
        "mistral_call_id": NamedFormat(
            call_opener="[TOOL_CALLS]",
            separator="[ARGS]",
            id_opener="[CALL_ID]",
            shown_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ),
    }
)

_GPT_OSS = NamedFormat(
    # `<|call|>`, which follows a call, is one of the model's end-of-sequence tokens.
    call_opener="<|channel|>commentary to=functions.",
    separator=" <|constrain|>json<|message|>",
    one_call=True,
    shown_tokens=HARMONY_TOKENS,
)
"""How the model writes calls. They are read together with everything else in channels
(serving/text/reasoning/harmony.py)."""

PYTHONIC = PythonicFormat(opener="<|python_start|>", closer="<|python_end|>")

_DSML = "｜DSML｜"
_GLM = TaggedFormat(
    call_opener="<tool_call>",
    call_closer="</tool_call>",
    key_opener="<arg_key>",
    key_closer="</arg_key>",
    value_opener="<arg_value>",
    value_closer="</arg_value>",
)

TAGGED_FORMATS: Mapping[FormatName, TaggedFormat] = MappingProxyType(
    {
        "qwen3_coder": TaggedFormat(
            call_opener="<tool_call>",
            call_closer="</tool_call>",
            name_opener="<function=",
            name_closer=">",
            key_opener="<parameter=",
            key_closer=">",
            value_closer="</parameter>",
            function_closer="</function>",
            line_end="\n",
            value_frame="\n",
        ),
        "glm45": replace(_GLM, line_end="\n"),
        "glm47": _GLM,
        "deepseek_v32": TaggedFormat(
            prefix=f"<{_DSML}function_calls>\n",
            call_opener=f'<{_DSML}invoke name="',
            name_closer='">',
            key_opener=f'<{_DSML}parameter name="',
            key_closer='" string="',
            string_opener='true">',
            value_opener='false">',
            value_closer=f"</{_DSML}parameter>",
            call_closer=f"</{_DSML}invoke>",
            suffix=f"\n</{_DSML}function_calls>",
            line_end="\n",
            inner_tokens=(_DSML,),
        ),
    }
)

JSON_FORMATS: Mapping[FormatName, JsonCallFormat] = MappingProxyType(
    {
        "hermes": JsonCallFormat(
            arguments="arguments",
            prefix="<tool_call>\n",
            between="\n</tool_call>\n<tool_call>\n",
            suffix="\n</tool_call>",
            opener="<tool_call>",
            closer="</tool_call>",
        ),
        "llama3": JsonCallFormat(
            arguments="parameters",
            prefix="",
            between="; ",
            suffix="",
            opener="<|python_tag|>",
            filler=";",
            bare=True,
        ),
        "mistral": JsonCallFormat(
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


CallFormat = JsonCallFormat | NamedFormat | TaggedFormat | PythonicFormat

_FORMATS: Mapping[FormatName, CallFormat] = MappingProxyType(
    {**JSON_FORMATS, **NAMED_FORMATS, **TAGGED_FORMATS, "gpt_oss": _GPT_OSS, "pythonic": PYTHONIC}
)


def tool_format(name: FormatName) -> CallFormat:
    """The format of that name."""
    return _FORMATS[name]


def format_of(template: str) -> FormatName | None:
    """The format that a chat template teaches; None if it teaches none, or one that is not supported."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return _format_in_tags(template)
    if "<|channel|>" in template:
        return "gpt_oss" if "to=functions." in template else None
    if "[TOOL_CALLS]" in template:
        return _format_of_mistral(template)
    if _DSML in template:
        return "deepseek_v32"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    in_json = "<|python_tag|>" in template and '"parameters"' in template
    if not in_json and _LIST_OF_PYTHON_CALLS.search(template):
        return "pythonic"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def _format_of_mistral(template: str) -> FormatName:
    if "[ARGS]" not in template:
        return "mistral"
    return "mistral_call_id" if "[CALL_ID]" in template else "mistral_v11"


def _format_in_tags(template: str) -> FormatName | None:
    """Chooses between the formats with the tag `<tool_call>`."""
    if "<arg_key>" in template:
        return "glm45" if _LINE_BEFORE_KEY.search(template) else "glm47"
    if "<function=" in template:
        return "qwen3_coder" if "<parameter=" in template else None
    return "hermes"
