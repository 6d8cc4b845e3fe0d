"""All compared servers get the same random model and the same tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.peers.models import (
    HEAD_DIM,
    NUM_BYTES,
    SHAPES,
    SPECIAL,
    characters,
    config_of,
    gguf_name,
    in_pairs,
    random_weights,
    write_tokenizer,
)


def test_a_text_has_the_tokens_it_was_made_of(tmp_path: Path) -> None:
    for size, shape in SHAPES.items():
        vocabulary = characters(shape[-1])
        assert len(SPECIAL) + NUM_BYTES + len(vocabulary) == shape[-1] == config_of(size)["vocab_size"]
        write_tokenizer(tmp_path, vocabulary)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokens = torch.randint(len(SPECIAL) + NUM_BYTES, shape[-1], (500,)).tolist()
        assert tokenizer.encode(tokenizer.decode(tokens)).ids == tokens


def test_features_that_turn_together_are_put_side_by_side() -> None:
    config = config_of("5m")
    heads = config["num_attention_heads"]
    numbers = torch.arange(heads * HEAD_DIM)[:, None].expand(-1, 3).contiguous()
    paired = in_pairs("model.layers.0.self_attn.q_proj.weight", numbers, config)[:, 0].view(heads, HEAD_DIM)
    for head in range(heads):
        first = torch.arange(HEAD_DIM // 2) + head * HEAD_DIM
        assert torch.equal(paired[head, 0::2], first)
        assert torch.equal(paired[head, 1::2], first + HEAD_DIM // 2)
    assert in_pairs("model.layers.0.mlp.up_proj.weight", numbers, config) is numbers


def test_every_weight_has_a_name_in_both() -> None:
    names = {gguf_name(name) for name in random_weights(config_of("5m"))}
    assert {"token_embd.weight", "output_norm.weight", "blk.3.ffn_gate.weight"} <= names
    assert len(names) == 2 + 9 * SHAPES["5m"][2]
