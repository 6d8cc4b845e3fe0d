"""Adapters with random weights, made and saved by PEFT, and the model of transformers that runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch

from engine.settings import AdapterSettings

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]},
    "some": {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True},
    "uneven": {
        "r": 4,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"o_proj": 11, "layers.0.self_attn.k_proj": 1},
        "alpha_pattern": {"self_attn.q_proj": 20, "down_proj": 2.5},
        "layers_to_transform": [0],
    },
}
SPREAD = 0.15
"""The standard deviation of random weights: large enough for other tokens."""


def adapted(model: Any, directory: Path, names: list[str]) -> tuple[Any, list[AdapterSettings]]:
    """Adds these of CONFIGS to a model, which is changed, and saves each in a folder of its own. Saves nothing of the
    model itself."""
    generator = torch.Generator().manual_seed(3)
    configs = {name: peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name]) for name in names}
    first, *others = names
    whole: Any = peft.get_peft_model(model, configs[first], adapter_name=first).eval()
    for name in others:
        whole.add_adapter(name, configs[name])
    with torch.no_grad():
        for parameter_name, parameter in whole.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    whole.save_pretrained(directory, selected_adapters=names)
    return whole, [AdapterSettings(name, str(directory / name)) for name in names]


def running(model: Any, adapter: str) -> Any:
    """The model with this one of its adapters; "" is none."""
    if adapter:
        model.base_model.enable_adapter_layers()
        model.set_adapter(adapter)
    else:
        model.base_model.disable_adapter_layers()
    return model
