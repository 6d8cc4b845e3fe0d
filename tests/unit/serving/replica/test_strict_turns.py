"""Turns with strict functions on replicas: calls fit, a takeover in the middle of a call works, and turns without calls
are as ever."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from engine.settings import SpeculationSettings
from serving.text.text import TextProcessor
from serving.wire.turns import ResumedTurn, TurnCall
from tests.unit.serving.replica_rig import VOCAB_SIZE, call, running_rig, tokens_of
from tests.unit.serving.small_tokenizer import byte_level_tokenizer
from tests.unit.serving.tool_texts import read_json_calls

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
STRICT = json.dumps(
    {
        "format": "hermes",
        "reasoning": None,
        "functions": [{"name": "get_weather", "parameters": SCHEMA, "must": True}],
    }
)
TEXT = TextProcessor(byte_level_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=512)


def strict_call() -> TurnCall:
    return call([8, 9], max_new_tokens=160, strict_calls=STRICT)


def opened(words: str = "Rex: ") -> tuple[int, ...]:
    """The beginning of an answer that begins a call."""
    assert TEXT.tokenizer is not None
    return tuple(TEXT.tokenizer.encode(f"{words}<tool_call>\n{{", add_special_tokens=False).ids)


async def test_a_call_that_the_model_begins_fits_its_function(tmp_path: Path) -> None:
    async with running_rig(tmp_path, text=TEXT) as rig:
        events = await rig.run(replace(strict_call(), resumed=ResumedTurn(opened())))
    assert events[-1].error is None
    said, made, *_ = read_json_calls("hermes", "".join(event.text for event in events))
    assert said == "Rex:"
    assert not isinstance(made, str)
    jsonschema.validate(json.loads(made.arguments), SCHEMA)
    assert len(tokens_of(events)) == 160, "behind the call the model is free, and has not ended"


async def test_taken_over_in_the_middle_of_a_call_it_goes_on_the_same(tmp_path: Path) -> None:
    begun = opened()
    async with running_rig(tmp_path / "a", text=TEXT) as rig:
        whole = await rig.run(replace(strict_call(), resumed=ResumedTurn(begun)))
    tokens = tokens_of(whole)
    for known in range(len(begun), len(begun) + 60, 13):
        async with running_rig(tmp_path / f"b{known}", text=TEXT) as rig:
            again = await rig.run(replace(strict_call(), resumed=ResumedTurn(tuple(tokens[:known]))))
        assert tokens_of(again) == tokens


@pytest.mark.parametrize(
    "speculation", [SpeculationSettings(), SpeculationSettings("ngram", 4, 1, row_cost=0.0)]
)
async def test_a_turn_that_makes_no_call_is_as_without_strict_functions(
    tmp_path: Path, speculation: SpeculationSettings
) -> None:
    async with running_rig(tmp_path, text=TEXT, speculation=speculation) as rig:
        asked = call([*range(3, 203)], max_new_tokens=60)  # the answer repeats some of these tokens
        strict = await rig.run(replace(asked, strict_calls=STRICT))
        free = await rig.run(asked)
    assert tokens_of(strict) == tokens_of(free)
    assert strict[-1].draft_tokens == free[-1].draft_tokens
    assert (speculation.method == "off") == (strict[-1].draft_tokens == 0)
