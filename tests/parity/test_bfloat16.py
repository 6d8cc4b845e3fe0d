"""bfloat16 against transformers in float32, with the same rounded weights. Logits are close, and every token is nearly
the best one. On a GPU activations and KV are bfloat16. A CPU computes in float32; this test makes it use bfloat16
too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.batch import BatchItem, ScheduledBatch
from engine.models import loader
from engine.models.linear import PlainLinear
from engine.models.loader import LoadedModel, load_model
from engine.settings import ModelSettings
from tests.parity.place import DEVICE, load_here
from tests.parity.streams import VOCAB, Peer, plain_runner, poisoned_pool, prompts, serve
from tests.parity.test_models import CONFIGS

FAMILIES = ("llama", "llama-heads", "qwen3", "mistral-window")
LOGITS_TOLERANCE = 0.04
"""Largest error, as a share of the norm of all logits."""

NEAR_TIE = 0.15
"""How far a token's logit may lie below the best one, in standard deviations of the row's logits."""

MOST_TIES = 0.15
"""The most tokens that may differ from the best one, as a share of all tokens."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Peer, LoadedModel]]:
    torch.manual_seed(9)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[request.param](), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            parameter.copy_(parameter.bfloat16())
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    peer = Peer(model, directory)
    if DEVICE.type == "cuda":
        yield peer, load_here(directory, "bfloat16")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "activation_dtype", lambda _device, weights: weights)
        settings = ModelSettings(str(directory), dtype="bfloat16", device="cpu", num_threads=1)
        yield peer, load_model(settings, make_linear=PlainLinear)


def test_logits_are_close(pair: tuple[Peer, LoadedModel]) -> None:
    peer, loaded = pair
    assert loaded.dtype == torch.bfloat16
    pool = poisoned_pool(loaded, 16, 8)
    tokens = prompts()[3]
    item = BatchItem("a", tokens, 0, np.arange(8, dtype=np.int32), True, None, input_logprobs_from=0)
    item.top_input_logprobs = VOCAB
    item.window_pages = item.pages if pool.window else None
    scored = plain_runner(loaded, pool).execute(ScheduledBatch([item])).items[0].input_logprobs
    found_TV = torch.tensor([[value for _, value in sorted(entry.top)] for entry in scored[1:]])
    expected_TV = torch.log_softmax(peer.logits(tokens)[: len(found_TV)], -1)
    found_TV, expected_TV = (each - each.mean(-1, keepdim=True) for each in (found_TV, expected_TV))
    error = float((found_TV - expected_TV).norm() / expected_TV.norm())
    assert 0 < error < LOGITS_TOLERANCE


def test_tokens_are_nearly_the_best(pair: tuple[Peer, LoadedModel]) -> None:
    peer, loaded = pair
    ties, count = 0, 0
    for page_size, scattered in ((1, True), (16, False)):
        for stream in serve(loaded, prompts(), page_size, scattered, chunk=13):
            logits_TV = peer.logits(stream.tokens[:-1])
            for position in range(stream.prompt_len, len(stream.tokens)):
                row_V = logits_TV[position - 1]
                gap = float((row_V.max() - row_V[stream.tokens[position]]) / row_V.std())
                assert gap < NEAR_TIE, (stream.name, position, gap)
                ties += gap > 0
                count += 1
    assert ties <= MOST_TIES * count
