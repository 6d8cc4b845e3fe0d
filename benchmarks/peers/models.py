"""One random Llama, as Kedge and as llama.cpp load it: safetensors with a tokenizer, and GGUF.

Each token is one character, so a text that is sent back has the tokens it was made of: a server that is sent the
history again finds all of it in its cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from torch import Tensor

SPECIAL = ["<unk>", "<s>", "</s>"]
NUM_BYTES = 256
"""Byte tokens, which llama.cpp's kind of vocabulary must have. They are never picked."""

ASCII = [chr(code) for code in range(33, 127)]
SPACE = "\u2581"
FIRST_IDEOGRAPH, NUM_IDEOGRAPHS = 0x4E00, 20_900
FIRST_SYLLABLE = 0xAC00

CONTEXT_LEN = 2048
SHAPES = {
    "5m": (256, 512, 4, 4, 2, 2048),
    "505m": (1280, 3584, 26, 20, 5, 32_000),
}
"""Hidden and inner size, layers, query and key heads, vocabulary."""

HEAD_DIM = 64
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make(size: str, folder: Path, gguf_package: Path) -> tuple[Path, Path]:
    """The model's folder for Kedge and its file for llama.cpp, made if missing. `gguf_package` is the folder where
    llama.cpp keeps its own writer."""
    directory, file = folder / size, folder / f"{size}.gguf"
    if file.is_file():
        return directory, file
    directory.mkdir(parents=True, exist_ok=True)
    config, vocabulary = config_of(size), characters(SHAPES[size][-1])
    weights = random_weights(config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, vocabulary)
    unfinished = file.with_suffix(".part")
    write_gguf(unfinished, config, vocabulary, weights, gguf_package)
    unfinished.rename(file)
    return directory, file


def config_of(size: str) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_LEN,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def characters(count: int) -> list[str]:
    """The tokens after the special ones and the bytes."""
    others = [chr(FIRST_IDEOGRAPH + n) for n in range(NUM_IDEOGRAPHS)]
    others += [chr(FIRST_SYLLABLE + n) for n in range(11_000)]
    return [SPACE, *ASCII, *others][: count - len(SPECIAL) - NUM_BYTES]


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * 0.02).bfloat16()

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)}
    weights["model.embed_tokens.weight"][: len(SPECIAL) + NUM_BYTES] = 0  # never the most likely
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
    return weights


def write_tokenizer(directory: Path, vocabulary: list[str]) -> None:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES)), *vocabulary]
    numbers = {token: number for number, token in enumerate(tokens)}
    numbers[" "] = numbers.pop(SPACE)
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=numbers, merges=[], unk_token=SPECIAL[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    about["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def write_gguf(
    file: Path, config: dict[str, Any], vocabulary: list[str], weights: dict[str, Tensor], gguf_package: Path
) -> None:
    sys.path.insert(0, str(gguf_package))
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("random")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES)), *vocabulary]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * NUM_BYTES]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * len(vocabulary)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for name, weight in weights.items():
        if weight.dim() == 1:
            writer.add_tensor(gguf_name(name), weight.float().numpy())
            continue
        bits = in_pairs(name, weight, config).contiguous().view(torch.uint16).numpy().view(np.uint8)
        writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[
            name
        ]
    layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def in_pairs(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """Query and key features in llama.cpp's order, where the two features that rotate together are adjacent."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return weight
    return weight.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(weight.shape)
