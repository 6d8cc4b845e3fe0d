"""Every parser of calls knows whether an answer ended within a call's arguments."""

from __future__ import annotations

import json

import pytest

from serving.text.answer_parsers import answer_parser
from serving.text.answer_pieces import CallPiece
from serving.text.tool_calls.formats import FormatName
from tests.unit.serving.text.test_answer_parsers import HARMONY_CALL

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
ARGUMENTS = '{"a": 1, "b": "x}y"}'
CALLS: dict[FormatName, str] = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'{{"name": "f", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]',
    "mistral_v11": f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}",
    "mistral_call_id": f"[TOOL_CALLS]f[CALL_ID]aB3dEfgh9[ARGS]{ARGUMENTS}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">'
    '1</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">x}y</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx}y\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x}y</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
    "<arg_value>x}y</arg_value></tool_call>",
    "gpt_oss": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}",
    "pythonic": '[f(a=1, b="x}y")]',
}


def told(name: FormatName, *parts: str) -> tuple[dict[int, str], bool]:
    """The arguments of each call, and whether one was broken off."""
    parser = answer_parser(name, SCHEMAS, "think", inside=False)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return arguments, parser.is_broken_off


def is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_broken_off_where_a_calls_arguments_are_not_whole(name: FormatName) -> None:
    """An answer is ended after each of its characters, and told in one piece or in many."""
    whole = CALLS[name]
    assert told(name, whole) == ({0: json.dumps(json.loads(ARGUMENTS))}, False)
    ends = []
    for end in range(len(whole) + 1):
        arguments, broken_off = told(name, whole[:end])
        assert (arguments, broken_off) == told(name, *whole[:end])
        assert broken_off == any(not is_whole(each) for each in arguments.values()), whole[:end]
        ends.append(broken_off)
    assert any(ends)
    assert not ends[-1]


def test_a_call_that_ended_too_early_counts_when_others_follow() -> None:
    early = f"{HARMONY_CALL[:-2]}<|end|><|start|>assistant"
    assert told("gpt_oss", early + HARMONY_CALL) == ({0: '{"a": ', 1: '{"a": 1}'}, True)
    assert told("gpt_oss", f"{early}<|channel|>final<|message|>Rex.") == ({0: '{"a": '}, True)
    assert told("gpt_oss", f"{HARMONY_CALL}<|end|><|start|>assistant{HARMONY_CALL}")[1] is False
