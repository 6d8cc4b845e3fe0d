"""How large the pool is, and what a page costs."""

from __future__ import annotations

import pytest
import torch

from engine.models.config import ModelSpec, parse_spec
from engine.runner.kv_pool import PoolTooSmall, make_kv_pool
from engine.settings import CacheSettings

CPU = torch.device("cpu")


def spec() -> ModelSpec:
    return parse_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 32,
            "intermediate_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )


def test_pages_by_number_and_by_size() -> None:
    by_number = make_kv_pool(spec(), CacheSettings(page_size=16, num_pages=5), torch.float32, CPU)
    assert by_number.num_pages == 5
    assert by_number.page_size_bytes == 16 * 3 * 2 * 2 * 8 * 4
    assert by_number.page_size_bytes * 5 == by_number.kv_L2KSD.nbytes
    size = by_number.page_size_bytes * 7 + 100
    by_size = make_kv_pool(spec(), CacheSettings(page_size=16, size_bytes=size), torch.float32, CPU)
    assert by_size.num_pages == 7


def test_too_small() -> None:
    with pytest.raises(PoolTooSmall, match="cache has 100"):
        make_kv_pool(spec(), CacheSettings(page_size=16, size_bytes=100), torch.float32, CPU)
