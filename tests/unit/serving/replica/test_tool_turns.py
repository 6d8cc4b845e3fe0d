"""Tools on replicas: marks that are special tokens, calls, and sessions that go on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from engine.api import Finish, FinishReason
from serving.text.answer_pieces import CallPiece
from serving.text.text import TextProcessor
from serving.text.tool_calls.formats import JSON_FORMATS, FormatName
from serving.wire.turns import ChatPrompt, OutputConstraint, ResumedTurn, TurnCall
from tests.unit.serving.held_outputs import any_output, grammars_of, held_to_calls
from tests.unit.serving.replica_rig import REPLICA_ID, VOCAB_SIZE, call, running_rig, tokens_of
from tests.unit.serving.small_tokenizer import END_ID, byte_level_tokenizer, piece_tokenizer
from tests.unit.serving.tool_texts import read_json_calls

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def wanted(name: FormatName) -> OutputConstraint:
    functions = [{"name": "get_weather", "parameters": SCHEMA}]
    source = {"format": name, "functions": functions, "parallel": False, "answer": None}
    return OutputConstraint("tool_calls", json.dumps(source))


def with_marks(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("make", [byte_level_tokenizer, piece_tokenizer])
def test_calls_with_special_marks(name: FormatName, make: type) -> None:
    tokenizer = with_marks(make())
    text = TextProcessor(tokenizer, vocab_size=len(tokenizer), max_context_len=1000)
    grammars = grammars_of(tokenizer)
    form = JSON_FORMATS[name]
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in (form.opener, form.closer) if len(mark) > 1]
    for seed in range(6):
        held = held_to_calls(grammars, name, {"get_weather": SCHEMA}, parallel=seed > 2)
        token_ids = any_output(held, seed)
        output = text.output_text(shown=(form.opener, form.closer))
        shown = output.push(token_ids, Finish(FinishReason.STOP))
        assert all(mark in token_ids for mark in marks if form.prefix)
        calls = read_json_calls(name, shown)
        assert [piece.index for piece in calls if isinstance(piece, CallPiece)] == list(range(len(calls)))
        assert all(json.loads(piece.arguments)["city"] in ("Bern", "Köln") for piece in calls)
        hidden = text.output_text().push(token_ids, Finish(FinishReason.STOP))
        assert form.opener not in hidden


@pytest.mark.parametrize("make", [byte_level_tokenizer, piece_tokenizer])
def test_only_what_is_to_be_shown_is_shown(make: type) -> None:
    tokenizer = with_marks(make())
    text = TextProcessor(tokenizer, vocab_size=len(tokenizer), max_context_len=1000)
    opener, python = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "<|python_tag|>"))
    ids = [opener, *text._encode("dog", "prompt"), python, opener]
    shown = text.output_text(shown=("<tool_call>", "unknown")).push(ids, Finish(FinishReason.LENGTH))
    assert shown.replace(" ", "") == "<tool_call>dog<tool_call>"
    watcher = text.output_text(("<tool_call>",), shown=("<tool_call>",)).watcher
    assert watcher is not None
    assert watcher.accept(opener) == "<tool_call>", "a stop string sees the same text"


async def test_begun_elsewhere_it_goes_on_in_the_middle(tmp_path: Path) -> None:
    """The replica of a call is lost. The next replica has the same text, so the client gets the same call."""
    text = TextProcessor(byte_level_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=512)
    held = call([8, 9], max_new_tokens=200, constraint=wanted("hermes"))
    async with running_rig(tmp_path / "a", text=text) as rig:
        whole = await rig.run(held)
    tokens = tokens_of(whole)
    shown = "".join(event.text for event in whole)
    assert read_json_calls("hermes", shown) == [
        CallPiece(0, "get_weather", shown.partition('"arguments": ')[2][:-14])
    ]
    for known in (1, len(tokens) // 2, len(tokens) - 1):
        async with running_rig(tmp_path / f"b{known}", text=text) as rig:
            again = await rig.run(replace(held, resumed=ResumedTurn(tuple(tokens[:known]))))
            assert tokens_of(again) == tokens
            assert "".join(event.text for event in again) == shown


async def test_the_next_owner_knows_the_tools_of_a_session(tmp_path: Path) -> None:
    text = TextProcessor(byte_level_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=512)
    message = {"role": "user", "content": "hi"}

    def chat(name: str) -> TurnCall:
        prompt = ChatPrompt((message,), tools=({"type": "function", "function": {"name": name}},))
        return replace(call([], "s"), prompt=prompt)

    async with (
        running_rig(tmp_path, text=text) as one,
        running_rig(tmp_path, text=text, replica_id="b", controller=one.controller) as other,
    ):
        first = (await one.run(chat("f"), one.open_session("s")))[-1]
        cluster = one.controller.cluster
        cluster.register_replica(other.heartbeats.status())
        cluster.report_unreachable(REPLICA_ID, True)
        epoch = cluster.resolve("s", False, "").epoch
        (refused,) = await other.run(chat("g"), epoch)
        assert refused.error is not None
        assert (refused.error.status, refused.error.code) == (400, "tools_differ")
        last = (await other.run(chat("f"), epoch))[-1]
        assert last.error is None
        assert last.prompt_tokens > first.prompt_tokens + first.completion_tokens


def test_the_models_own_end_is_not_shown() -> None:
    text = TextProcessor(with_marks(byte_level_tokenizer()), vocab_size=700, max_context_len=1000)
    kept = text.output_text(trim_stop=False, shown=("<tool_call>",))
    assert kept.push([END_ID], Finish(FinishReason.STOP, END_ID)) == ""
