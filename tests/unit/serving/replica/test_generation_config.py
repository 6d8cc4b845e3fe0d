"""The model's own generation_config.json gives the defaults of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serving.replica.generation_config import GENERATION_CONFIG, sampling_defaults
from serving.wire.turns import SamplingDefaults
from tests.unit.serving.local_service import MODEL, local_client

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDED = Path(__file__).parents[4] / "assets" / "models" / "kedge-chat"
QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(QWEN), SamplingDefaults(0.7, 0.8, 20, 0.0, 1.05)),
        (json.dumps({"eos_token_id": 2, "max_new_tokens": 9}), SamplingDefaults(max_new_tokens=9)),
        (json.dumps({"temperature": None, "top_p": 0, "top_k": 1.5, "min_p": "a"}), SamplingDefaults()),
        (
            json.dumps({"temperature": True, "repetition_penalty": -1, "max_new_tokens": 0}),
            SamplingDefaults(),
        ),
        ('{"temperature": NaN, "repetition_penalty": Infinity}', SamplingDefaults()),
        ('{"temperature": 1e39, "repetition_penalty": 1e-39}', SamplingDefaults()),
        ("[]", SamplingDefaults()),
        ("{", SamplingDefaults()),
        (None, SamplingDefaults()),
    ],
)
def test_what_is_read(tmp_path: Path, text: str | None, expected: SamplingDefaults) -> None:
    if text is not None:
        (tmp_path / GENERATION_CONFIG).write_text(text)
    assert sampling_defaults(tmp_path) == expected


def test_the_built_in_model_says_nothing() -> None:
    assert sampling_defaults(EMBEDDED) == SamplingDefaults()


async def test_they_are_taken_where_a_request_says_nothing(tmp_path: Path) -> None:
    own = SamplingDefaults(0.7, 0.8, 20, 0.1, 1.05, max_new_tokens=9)
    said: dict[str, Any] = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    asked = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}
    async with local_client(tmp_path) as (client, service):
        service.model = replace(MODEL, sampling=own)
        for path, body in asked.items():
            await client.post(path, json=body)
            call = service.calls[-1]
            got = call.sampling
            assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.7, 0.8, 20, 0.1)
            assert (got.repetition_penalty, call.max_new_tokens) == (1.05, 9)
            await client.post(path, json=body | said | {"max_tokens": 5})
            call = service.calls[-1]
            got = call.sampling
            assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0, 1, 0, 0)
            assert (got.repetition_penalty, call.max_new_tokens) == (1, 5)
            await client.post(path, json=body | {"max_tokens": 50})
            assert service.calls[-1].max_new_tokens == 9
        await client.post("/generate", json={"text": "hi"})
        assert service.calls[-1].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("path", "asked", "limit"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
        ("/v1/responses", {"input": "hi", "store": False}, "max_output_tokens"),
    ],
)
async def test_messages_and_responses_take_them_too(
    tmp_path: Path, path: str, asked: dict[str, Any], limit: str
) -> None:
    """The Messages API used to have defaults of its own."""
    async with local_client(tmp_path) as (client, service):
        service.model = replace(MODEL, sampling=SamplingDefaults(0.7, 0.8, 20, 0.1, 1.05, max_new_tokens=9))
        for said, expected in (
            ({limit: 50}, (0.7, 0.8, 20, 0.1, 1.05, 9)),
            ({limit: 5, "temperature": 0, "top_p": 1, "top_k": 0}, (0, 1, 0, 0.1, 1.05, 5)),
        ):
            assert (await client.post(path, json=asked | said)).status_code == 200
            call = service.calls[-1]
            got = call.sampling
            told = (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty)
            assert (*told, call.max_new_tokens) == expected
