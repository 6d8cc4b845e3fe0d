"""P1: whatever happened before, a greedy turn gives the tokens of one fresh request that has the whole history.

50 random schedules of sessions and other requests, under chunking, retraction, aborts, rewinds, evictions and demotion.
The tests run in float32 and compare with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import ScheduledBatch
from engine.models.loader import LoadedModel
from tests.parity.place import DEVICE, load_here
from tests.parity.schedules import LONGEST, POOLS, Finished, Schedule
from tests.unit.engine.driver import VOCAB, Driver

TIE = 4e-6 if DEVICE.type == "cpu" else 1e-4
"""How far below the reference's first choice a token's logit may be: on a CPU the rounding of float32, whose numbers
from 8 to 16 are 1e-6 apart. Which of two such tokens is first depends on the processor, for transformers, too. A GPU
adds up in another order, and the logits of these models in float32 are up to 3e-5 from those in float64."""

EMBEDDED = Path(__file__).parents[2] / "assets" / "models" / "kedge-chat"

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

ALTERNATING = ["sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, sliding_window=24),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=24, attn_logit_softcapping=3.0, tie_word_embeddings=False
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=24, layer_types=ALTERNATING, tie_word_embeddings=False
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL,
        head_dim=16,
        sliding_window=24,
        layer_types=ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=YARN,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        kv_lora_rank=24,
        q_lora_rank=28,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
}
"""The last four have windows in every other layer, capped scores, sinks with experts, and latents. The Gemmas use the
bridge; on a GPU the two after them do, too."""

MODELS = ("embedded", *FAMILIES)
SCHEDULES_PER_MODEL = 10
AT_EVERY_CHANGE = 4
"""So many schedules of each model run at every change, and all of them in the long suites."""


@dataclass
class Pair:
    """One checkpoint in transformers and in the engine."""

    reference: Any
    loaded: LoadedModel
    first_seed: int


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = EMBEDDED
    if request.param != "embedded":
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param](), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        directory = tmp_path_factory.mktemp(request.param)
        model.save_pretrained(directory)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return Pair(reference, load_here(directory), SCHEDULES_PER_MODEL * MODELS.index(request.param))


@torch.inference_mode()
def logits_of(reference: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The reference's logits [T, V] of each sequence, by one pass over all of them. Causal attention does not see
    padding on the right."""
    longest = max(map(len, sequences))
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
    return list(reference(padded, attention_mask=torch.ones_like(padded)).logits)


def assert_greedy(reference: Any, finished: list[Finished]) -> None:
    """Checks that each output token is the reference's first choice after all tokens before it. By induction this is
    what greedy generation gives."""
    logits = logits_of(reference, [each.tokens for each in finished])
    for each, logits_TV in zip(finished, logits, strict=True):
        for position in range(each.prompt_len, len(each.tokens)):
            row, token = logits_TV[position - 1], each.tokens[position]
            best = int(row.argmax())
            gap = float(row[best] - row[token])
            assert token == best or gap <= TIE, (
                f"{each.what}: position {position} is {token}, not {best}; logit gap {gap:.3g}"
            )


def generate(reference: Any, prompt: list[int], count: int) -> list[int]:
    """The reference's own generation of exactly `count` tokens. End tokens do not end it."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.slow] * (number >= AT_EVERY_CHANGE))
        for number in range(SCHEDULES_PER_MODEL)
    ],
)
def test_every_finished_turn_equals_one_fresh_request(pair: Pair, number: int) -> None:
    schedule = Schedule.over_model(pair.loaded, seed=pair.first_seed + number)
    schedule.run()
    assert len(schedule.finished) >= 3
    assert_greedy(pair.reference, schedule.finished)
    if number == 0:  # that one pass shows what generation gives
        last = schedule.finished[-1]
        expected = generate(
            pair.reference, last.tokens[: last.prompt_len], len(last.tokens) - last.prompt_len
        )
        assert last.tokens[last.prompt_len :] == expected


def test_the_schedules_cover_what_they_should() -> None:
    """Retractions, demotions, aborts and rewinds really happen in the schedules. Hardly any draw depends on the
    model."""
    schedules = [Schedule.make(null_driver, VOCAB, seed) for seed in range(len(MODELS) * SCHEDULES_PER_MODEL)]
    for schedule in schedules:
        schedule.run()
    assert sum(schedule.driver.counters.retractions for schedule in schedules) >= 50
    assert sum(schedule.driver.cache.tiers.num_to_log for schedule in schedules) >= 50
    assert sum(schedule.aborted for schedule in schedules) >= 20
    assert sum(schedule.rewound for schedule in schedules) >= 20
    assert sum(len(schedule.finished) for schedule in schedules) >= 350
    beside = [batch for schedule in schedules for batch in schedule.driver.batches if _mixes(batch)]
    assert len(beside) >= 10, "drafts beside tokens that are pending"


def _mixes(batch: ScheduledBatch) -> bool:
    return any(item.num_drafts for item in batch.items) and any(
        item.pending_from is not None for item in batch.items
    )


def null_driver(page_size: int, **limits: Any) -> Driver:
    return Driver(
        num_pages=POOLS[page_size],
        page_size=page_size,
        context_len=LONGEST + 1,
        eos_token_ids=frozenset(),
        **limits,
    )
