"""Loads a checkpoint's tokenizer without what only its model needs.

transformers chooses the tokenizer's class by the model's configuration. To read that, it imports torch's compiler, its
distributed tensors and sympy: 1.9 s of CPU time and 144 MiB in each replica that starts, beside replicas that answer.
Where the tokenizer's own files name its class, only a few fields of the configuration matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_DECIDING = ("model_type", "model_name", "tokenizer_class")
"""All fields of a configuration that AutoTokenizer reads if the tokenizer's files name a class of transformers."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that AutoTokenizer gives for a Hugging Face directory or a hub id; None for a directory without a
    tokenizer. Raises what AutoTokenizer raises."""
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).exists() for name in _FILES):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, config=_small_config(path), trust_remote_code=False
    )
    return tokenizer


def _small_config(path: str) -> PreTrainedConfig | None:
    """None where the whole configuration may matter: no class is named, or the class is the checkpoint's own code."""
    names = get_tokenizer_config(path)
    if not names.get("tokenizer_class") or "auto_map" in names:
        return None
    try:
        words: dict[str, Any] = PreTrainedConfig.get_config_dict(path)[0]
    except OSError:
        return None
    return PreTrainedConfig(name_or_path=path, **{name: words[name] for name in _DECIDING if name in words})
