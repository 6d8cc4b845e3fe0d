"""Log-probabilities of text completions: a client looks up each token among the likeliest in its place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.api import TokenLogprob
from serving.front.http import create_http_app
from serving.wire.turns import TextLogprob, TurnCall, TurnEvent, TurnFinish
from tests.unit.serving.local_service import client_of
from tests.unit.serving.telling_service import TellingService

FIRST = TextLogprob(TokenLogprob(6, None), b"a")
UNLIKELY = TextLogprob(TokenLogprob(7, -3.0, ((8, -0.1), (9, -0.2))), b"x", (b"y", b"z"))
LIKELY = TextLogprob(TokenLogprob(8, -0.1, ((8, -0.1), (9, -0.2))), b"y", (b"y", b"z"))


class Scored(TellingService):
    async def _events(self, call: TurnCall) -> AsyncIterator[TurnEvent]:
        assert call.logprobs is not None
        yield TurnEvent("", (), 5, 0, 0, input_logprobs=(FIRST, UNLIKELY))
        yield TurnEvent("xy", (7, 8), 5, 0, 2, logprobs=(UNLIKELY, LIKELY))
        yield TurnEvent("", (), 5, 0, 2, finish=TurnFinish("stop"))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, [{"x": -3.0}, {"y": -0.1}]),
        (1, [{"y": -0.1, "x": -3.0}, {"y": -0.1}]),
        (2, [{"y": -0.1, "z": -0.2, "x": -3.0}, {"y": -0.1, "z": -0.2}]),
    ],
)
async def test_the_token_itself_is_among_the_likeliest(most: int, expected: list[dict[str, float]]) -> None:
    asked: dict[str, Any] = {"prompt": "a", "logprobs": most}
    async with client_of(create_http_app(Scored())) as client:
        whole = (await client.post("/v1/completions", json=asked)).json()
        echoed = (await client.post("/v1/completions", json=asked | {"echo": True})).json()
        named = (
            await client.post("/v1/completions", json=asked | {"return_tokens_as_token_ids": True})
        ).json()
        lines = (await client.post("/v1/completions", json=asked | {"stream": True})).text.split("\n\n")
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == expected
    assert echoed["choices"][0]["logprobs"]["top_logprobs"] == [None, expected[0], *expected]
    assert named["choices"][0]["logprobs"]["top_logprobs"][0]["token_id:7"] == -3.0
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [top for each in told if each is not None for top in each["top_logprobs"]] == expected
