"""The configuration of a Llama with random weights that loads in a moment."""

from __future__ import annotations

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
