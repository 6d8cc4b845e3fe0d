"""Initial weights that already look back: a head for the previous token and heads that match it.

Copying needs two heads in different layers to agree. Small models find this only after millions of tokens. Here the
first layer starts with one head that attends to the previous token and one that attends to the token before it. In the
second layer the first head of each group attends to places whose previous token is the current one, and writes the
token at that place. Everything stays trainable. Other blocks start without effect: their output matrices are zero.

The previous-token head needs a direction that every token shares: column 0 of the embedding.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

SHARED = 0.16
SHARP = 6.5
WRITE = 0.07
MATCH = 1.6
COPY = 0.1


def _orthonormal_rows(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return basis.T


def _frequencies(model: LlamaForCausalLM, head_dim: int) -> Tensor:
    theta = float(model.config.rope_parameters["rope_theta"])
    frequencies: Tensor = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    return frequencies


def _position_pattern(frequencies: Tensor, offset: int, amplitude: float) -> Tensor:
    """A head vector. Its rotated score against offset 0 peaks ``offset`` tokens back. It uses the fastest pairs
    only."""
    fast = torch.zeros_like(frequencies)
    fast[: max(2, len(frequencies) // 4)] = amplitude
    angle = -offset * frequencies
    return torch.cat([fast * torch.cos(angle), fast * torch.sin(angle)])


@torch.no_grad()
def plant_copying_heads(model: LlamaForCausalLM) -> None:
    config = model.config
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim, per_group = hidden // heads, heads // groups
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = SHARED
    row_norm = math.sqrt(SHARED**2 + (hidden - 1) * config.initializer_range**2)
    amplitude = SHARP / (math.sqrt(hidden) * SHARED / row_norm)

    frequencies = _frequencies(model, head_dim)
    read = _orthonormal_rows(head_dim, hidden)
    write = _orthonormal_rows(head_dim * per_group, hidden).T
    first = model.model.layers[0].self_attn
    first.k_proj.weight[:head_dim].zero_()
    first.k_proj.weight[:head_dim, 0] = _position_pattern(frequencies, 0, amplitude)
    first.v_proj.weight[:head_dim] = read
    for head in range(min(2, per_group)):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        first.q_proj.weight[rows].zero_()
        first.q_proj.weight[rows, 0] = _position_pattern(frequencies, head + 1, amplitude)
        first.o_proj.weight[:, rows] = WRITE * write[:, rows]

    # Slow pairs only, so that a match counts the same at any distance.
    half = head_dim // 2
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, head_dim)])
    second = model.model.layers[1].self_attn
    for group in range(groups):
        part = slice(group * len(slow) % head_dim, group * len(slow) % head_dim + len(slow))
        keys = group * head_dim + slow
        queries = group * per_group * head_dim + slow
        second.k_proj.weight[group * head_dim : (group + 1) * head_dim].zero_()
        second.k_proj.weight[keys] = MATCH * write[:, :head_dim].T[part]
        first_head = slice(group * per_group * head_dim, group * per_group * head_dim + head_dim)
        second.q_proj.weight[first_head].zero_()
        second.q_proj.weight[queries] = MATCH * read[part]
        copied = _orthonormal_rows(head_dim, hidden)
        second.v_proj.weight[group * head_dim : (group + 1) * head_dim] = copied
        second.o_proj.weight[:, first_head] = COPY * copied.T
