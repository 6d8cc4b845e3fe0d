"""How config.json says that rotary frequencies are stretched, against transformers' own reading of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.errors import UnsupportedModel
from engine.models.rope import RopeSpec, parse_rope, rotary_frequencies

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8.0, "beta_slow": 2.0, "rope_theta": 500.0},
        {"beta_fast": None, "attention_factor": None},
        {"attention_factor": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"original_max_position_embeddings": 100_000},
        {"original_max_position_embeddings": 64, "factor": 1.0},
        {"factor": None},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_yarn_is_read_as_transformers_reads_it(changes: dict[str, Any], head_dim: int) -> None:
    config = {"max_position_embeddings": 131_072, "rope_parameters": YARN | changes}
    theirs = transformers.LlamaConfig(**config, head_dim=head_dim)
    frequencies_C, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    spec = parse_rope(config, 131_072)
    assert torch.equal(rotary_frequencies(spec, head_dim), frequencies_C)
    assert spec.attention_factor == attention_factor


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 4096}])
def test_the_original_length_may_stand_beside_the_scaling(kind: str, inner: dict[str, int]) -> None:
    """transformers takes that one first."""
    scaling = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | inner
    config = {
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 512,
        "rope_parameters": scaling | {"rope_theta": 10_000.0},
    }
    theirs = transformers.LlamaConfig(**copy.deepcopy(config), head_dim=64)
    frequencies_C, _ = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    spec = parse_rope(config, 131_072)
    assert torch.equal(rotary_frequencies(spec, 64), frequencies_C)


def test_without_scaling_its_keys_are_not_read() -> None:
    unused = {"rope_type": "default", "factor": 0, "beta_fast": "x"}
    assert parse_rope({"rope_theta": 5.0, "rope_scaling": unused}, 256) == RopeSpec(5.0)


def test_both_writings_of_yarn_are_one() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    old = parse_rope({"rope_theta": 1e6, "rope_scaling": scaling}, 131_072)
    assert old == parse_rope({"rope_parameters": scaling | {"rope_theta": 1e6, "rope_type": "yarn"}}, 131_072)
    assert old.attention_factor == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "yarn", "factor": "4"}, "factor must be a positive number, not '4'"),
        ({"rope_type": "yarn", "factor": True}, "factor must be"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor must be"),
        ({"rope_type": "yarn", "rope_theta": 1}, "rope_theta must be above 1 for yarn, not 1"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0.5}, "must be at least 1, not 0.5"),
        ("yarn", "rope_scaling must be an object, not 'yarn'"),
        ([{"rope_type": "yarn"}], "rope_scaling must be an object"),
        ({"rope_type": "yarn", "beta_fast": 0}, "beta_fast must be"),
        ({"rope_type": "llama3", "low_freq_factor": []}, "low_freq_factor must be"),
        ({"rope_theta": float("nan")}, "rope_theta must be"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refusals_name_the_key(parameters: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_rope({"rope_parameters": parameters}, 256)
