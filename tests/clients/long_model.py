"""A model with the built-in tokenizer, random weights and room for the prompts of command-line agents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cluster.served_cluster import ROOT

BUILT_IN = ROOT / "assets" / "models" / "kedge-chat"
MAX_POSITIONS = 131_072
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SMALLER = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}


def make_long_model(directory: Path) -> None:
    """Writes the config and tokenizer of a model. `load_format: dummy` gives it random weights."""
    for name in COPIED:
        shutil.copy(BUILT_IN / name, directory / name)
    config = json.loads((BUILT_IN / "config.json").read_text())
    config |= SMALLER | {"max_position_embeddings": MAX_POSITIONS}
    (directory / "config.json").write_text(json.dumps(config))
