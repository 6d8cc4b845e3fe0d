"""A request that could never run, or that would spoil a step for others, is refused at its submission, by field."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.api import (
    ContextLengthExceeded,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    LogprobParams,
    RequestTooLarge,
    SamplingParams,
)
from engine.request_check import RequestLimits, check_request
from tests.unit.engine.driver import VOCAB, request
from tests.unit.engine.engine_rig import Rig, running


@pytest.mark.parametrize(
    ("options", "error", "param", "says"),
    [
        ({"new_tokens": []}, InvalidRequest, "input_ids", "at least one new token"),
        ({"new_tokens": [1, VOCAB]}, InvalidRequest, "input_ids", f"0..{VOCAB - 1}"),
        ({"new_tokens": [-1]}, InvalidRequest, "input_ids", f"0..{VOCAB - 1}"),
        ({"new_tokens": [1], "history": [1], "history_len": 2}, InvalidRequest, "history_len", "fit"),
        ({"new_tokens": [1], "history": [1], "history_len": -1}, InvalidRequest, "history_len", "fit"),
        ({"new_tokens": [1] * 256}, ContextLengthExceeded, "input_ids", "256 tokens > 255 maximum .0 of history"),
        (
            {"new_tokens": [1] * 6, "history": [1] * 250, "history_len": 250},
            ContextLengthExceeded, "input_ids", "250 of history.. This model's maximum context length is 256 tokens",
        ),
        (
            {"new_tokens": [1] * 100, "max_new_tokens": 29},
            RequestTooLarge, "max_new_tokens", "129 tokens need 33 KV pages, the whole pool has 32",
        ),
        (
            {"new_tokens": [1, 2], "history": [1] * 8, "history_len": 8, "logprobs": LogprobParams(input_start=10)},
            InvalidRequest, "logprob_start_len", "position 10 on.*has positions 0..9 .8 of them history",
        ),
        (
            {"new_tokens": [1, 2], "logprobs": LogprobParams(input_start=2)},
            InvalidRequest, "logprob_start_len", "position 2 on.*has positions 0..1",
        ),
        (
            {"new_tokens": [1, 2], "logprobs": LogprobParams(input_start=-1)},
            InvalidRequest, "logprob_start_len", "position -1",
        ),
        ({"new_tokens": [1], "logprobs": LogprobParams(top=-1)}, InvalidRequest, "top_logprobs", "-1"),
        (
            {"new_tokens": [1], "max_new_tokens": 4, "resumed_tokens": [1] * 5},
            InvalidRequest, "resumed_tokens", "5 tokens of output cannot be resumed where 4 are the most",
        ),
        ({"new_tokens": [1], "resumed_tokens": [VOCAB]}, InvalidRequest, "resumed_tokens", f"0..{VOCAB - 1}"),
    ],
)  # fmt: skip
def test_what_could_never_run_is_refused_at_once(
    options: dict[str, Any], error: type[EngineError], param: str, says: str
) -> None:
    rig = Rig(num_pages=32)
    with pytest.raises(error, match=says) as caught:
        rig.submit(request("r", **options))
    assert caught.value.param == param
    assert rig.engine._inbox.empty()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_new_tokens", [-1]),
        ("temperature", [-0.1, 1.1e4, math.inf, math.nan]),
        ("top_p", [0.0, 1.1, math.nan]),
        ("top_k", [-1, 2**31]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("frequency_penalty", [2.1, math.inf, math.nan]),
        ("presence_penalty", [-2.1, -math.inf, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 1e-46, 1e39, math.inf, math.nan]),
        ("logit_bias", [{VOCAB: 1.0}, {-1: 1.0}, {1: math.nan}, {1: -101.0}, {1: math.inf}]),
        ("stop_token_ids", [frozenset({VOCAB}), frozenset({-1})]),
        ("bad_words", [((),), ((1, VOCAB),), ((1,), (-1,))]),
    ],
)
def test_sampling_out_of_range_is_refused(field: str, values: list[Any]) -> None:
    rig = Rig()
    for value in values:
        sampling = replace(SamplingParams(), **{field: value})
        with pytest.raises(InvalidRequest) as caught:
            rig.submit(request("r", [1], sampling=sampling))
        assert caught.value.param == field
    assert rig.engine._inbox.empty()


def test_the_ends_of_the_ranges_are_taken() -> None:
    least = SamplingParams(
        4, 0.0, 1e-9, 0, 0.0, logit_bias={0: -100.0}, stop_token_ids=frozenset({0}), seed=-1
    )
    most = SamplingParams(4, 1e4, 1.0, 2**31 - 1, 1.0, logit_bias={VOCAB - 1: 100.0}, seed=2**80)
    with running() as rig:
        for name, sampling in (("least", least), ("most", most)):
            assert rig.generate(request(name, [1, 2], sampling=sampling)).token_ids


class NotedWord(tuple[int, ...]):
    """A forbidden word that notes how often its ids are gone through."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


def test_the_words_that_all_choices_of_a_call_forbid_are_checked_once() -> None:
    """A call of 128 choices held an event loop for the sum of all its checks, some 60 ms."""
    limits = RequestLimits(VOCAB, max_context_len=256, page_size=4, num_pages=32)
    word = NotedWord((1, 2))
    words: tuple[tuple[int, ...], ...] = (word,)

    def choice() -> GenerateRequest:
        return request("a", [1], sampling=SamplingParams(4, bad_words=words))

    check_request(choice(), limits)
    reads = word.reads
    assert reads > 0
    check_request(choice(), limits)
    assert word.reads == reads
