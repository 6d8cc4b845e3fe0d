"""The embedded model under schemas and regular expressions: its output always fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.api import FinishReason, LogprobParams, SamplingParams, TokenConstraint
from serving.grammars.grammars import Grammars
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt, OutputConstraint
from tests.unit.engine.driver import Outcome, greedy, request
from tests.unit.engine.engine_rig import WAIT_S
from tests.unit.engine.model_rig import MODEL, ModelRig, running_model
from tests.unit.serving.held_outputs import allowed_ids
from tests.unit.serving.json_schemas import schemas

END = 2
TEXT = TextProcessor.load(str(MODEL), vocab_size=2048, max_context_len=2048)
GRAMMARS = Grammars(TEXT.tokenizer, 2048)
PROMPT = TEXT.encode_prompt(
    ChatPrompt(({"role": "user", "content": "My dog is called Rex. What is my dog called?"},))
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def constraint(schema: object) -> TokenConstraint:
    return GRAMMARS.begin(GRAMMARS.compile(OutputConstraint("json_schema", json.dumps(schema))))


def regex(source: str) -> TokenConstraint:
    return GRAMMARS.begin(GRAMMARS.compile(OutputConstraint("regex", source)))


def text_of(outcome: Outcome) -> str:
    ids = outcome.token_ids
    assert outcome.finish is not None
    output = TEXT.output_text()
    return output.push(ids, outcome.finish)


@pytest.fixture(scope="module", params=["off", "ngram"])
def model(request: pytest.FixtureRequest) -> Iterator[ModelRig]:
    with running_model(request.param, END) as rig:
        yield rig


def say(model: ModelRig, *asked: dict[str, Any]) -> list[Outcome]:
    """Runs these requests side by side."""
    specs = [request(model.new_name(), options.pop("prompt", PROMPT), **options) for options in asked]
    model.submit(*specs)
    return model.wait(*[spec.request_id for spec in specs])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wanted=schemas(), seed=st.integers(0, 2**40))
def test_every_finished_output_fits_its_schema(model: ModelRig, wanted: dict[str, object], seed: int) -> None:
    outcomes = say(
        model,
        *[
            {
                "sampling": SamplingParams(max_new_tokens=120, temperature=temperature, seed=seed),
                "constraint": constraint(wanted),
            }
            for temperature in (1.0, 0.0, 2.0)
        ],
    )
    for outcome in outcomes:
        assert outcome.reason in (FinishReason.STOP, FinishReason.LENGTH), outcome.finish
        if outcome.reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text_of(outcome)), wanted)


@pytest.fixture(scope="module")
def best() -> list[int]:
    """The greedy answer that fits PERSON: of transformers, with the mask laid over its logits by hand."""
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected: list[int] = []
    walk = constraint(PERSON)
    while not walk.complete:
        with torch.inference_mode():
            logits_V = reference(torch.tensor([[*PROMPT, *expected]])).logits[0, -1]
        allowed = allowed_ids(walk)
        expected.append(allowed[int(logits_V[allowed].argmax())])
        walk.accept(expected[-1])
    return expected


def test_greedy_is_the_best_of_what_is_allowed(model: ModelRig, best: list[int]) -> None:
    told = {"sampling": greedy(300), "constraint": constraint(PERSON)}
    free = {"sampling": greedy(60)}
    (alone,) = say(model, free.copy())
    held, beside = say(model, told, free)
    assert held.token_ids == best
    jsonschema.validate(json.loads(text_of(held)), PERSON)
    assert beside.token_ids == alone.token_ids


def test_log_probabilities_are_the_models_own(model: ModelRig) -> None:
    """The first token is one that the model by itself would hardly pick."""
    wants = {"sampling": greedy(3), "logprobs": LogprobParams(output=True, top=3)}
    free, held = say(model, wants.copy(), {**wants, "constraint": regex("[0-9]{3}")})
    assert dict(held.logprobs[0].top) == pytest.approx(dict(free.logprobs[0].top), abs=1e-4)
    assert held.logprobs[0].logprob is not None
    assert held.logprobs[0].logprob < min(logprob for _, logprob in held.logprobs[0].top)


def test_resumed_it_goes_on_in_the_middle(model: ModelRig) -> None:
    wants = {"sampling": SamplingParams(max_new_tokens=300, seed=11)}
    (whole,) = say(model, {**wants, "constraint": constraint(PERSON)})
    for known in (1, len(whole.token_ids) // 2, len(whole.token_ids)):
        told = whole.token_ids[:known]
        (resumed,) = say(model, {**wants, "constraint": constraint(PERSON), "resumed_tokens": told})
        assert resumed.token_ids == whole.token_ids
        assert resumed.finish == whole.finish


def test_the_turn_after_it_finds_its_kv(model: ModelRig) -> None:
    """A constrained turn and a free turn give the same as the whole history in one request."""
    wants = {"prompt": PROMPT, "session_id": "s", "sampling": greedy(300)}
    (first,) = say(model, {**wants, "constraint": constraint(PERSON)})
    assert first.reason is FinishReason.STOP
    history = [*PROMPT, *first.token_ids]
    more = TEXT.encode_prompt(
        ChatPrompt(({"role": "user", "content": "And what is my name?"},)),
        history_len=len(history),
        last_token=history[-1],
    )
    turn = {"prompt": more, "history": history, "history_len": len(history), "sampling": greedy(20)}
    (second,) = say(model, {**turn, "session_id": "s"})
    assert second.cached == len(history) - 1
    (fresh,) = say(model, {"prompt": [*history, *more], "sampling": greedy(20), "namespace": "fresh"})
    assert second.token_ids == fresh.token_ids
    model.engine.close_session("s").result(WAIT_S)
