"""Any causal language model of `transformers` over Kedge's paged KV, without code of its own.

transformers allows a function to replace attention. The bridge registers one for each model it holds: keys and values
go to the pages of the current step, and its attention reads them. Everything else is the model's own: rotary positions,
experts, norms, the head with its scaling and soft caps. What a model needs is found by running it
(engine/models/bridge_probe.py). A model whose results would differ is refused when it is loaded.

Legend: N tokens of the step, H query heads, K key/value heads, D head size, R chosen rows, E hidden size.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.attention.interface import AttentionStep, LayerTraits
from engine.models.bridge_probe import (
    ProbedModel,
    brief,
    check_agreement,
    context_limit,
    eager_logits,
    probe,
)
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.runner.kv_pool import KVLayout
from engine.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Bridged:
    """A model of transformers as the engine runs it."""

    model: BridgedModel
    layout: KVLayout
    vocab_size: int
    max_context_len: int
    sinks: int


class PagedAttention:
    """What transformers calls in place of its own attention. It works only during a step."""

    def __init__(self, probed: ProbedModel) -> None:
        self.name = f"kedge_{uuid.uuid4().hex}"
        self._probed = probed
        self._step: AttentionStep | None = None
        AttentionInterface.register(self.name, self)

    @contextmanager
    def serving(self, step: AttentionStep) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - the plan of the step knows who sees what
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,  # noqa: ARG002 - the probe has seen them
    ) -> tuple[Tensor, None]:
        """`query` [1, H, N, D], `key` and `value` [1, K, N, D]; returns [1, N, H, D]. Values may be narrower."""
        assert self._step is not None, "attention outside a step"
        layer, layout = self._probed.places[module.layer_idx], self._probed.layout
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        traits = LayerTraits(scale, layout.windows[layer], softcap, s_aux)
        width, value_width = layout.head_dim, value.shape[-1]
        kv_NJKD = torch.stack((_widened(key[0], width), _widened(value[0], width))).permute(2, 0, 1, 3)
        q_NHD = _widened(query[0], width).transpose(0, 1)
        out_NHD = self._step(layer, q_NHD, kv_NJKD, traits).view(q_NHD.shape)
        return out_NHD[None, ..., :value_width], None


def _widened(x: Tensor, width: int) -> Tensor:
    """Pads with zeros. They add nothing to a score, and the padded part of values is cut off again."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class BridgedModel:
    """A CausalModel."""

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        """`model` must already use `attention`."""
        self._attention = attention
        self._body = model.base_model
        self._head = _head_alone(model)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep) -> Tensor:
        with self._attention.serving(attend):
            output = self._body(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        hidden_NE: Tensor = output.last_hidden_state[0]
        return hidden_NE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        logits_RV: Tensor = self._head(inputs_embeds=hidden_RE[None], use_cache=False).logits[0]
        return logits_RV.float()


class _HiddenStates(BaseModelOutputWithPast):  # type: ignore[misc]
    """Any other field that a model's head reads from its decoder's output (the experts' router, for example) is
    None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _PassThrough(nn.Module):
    """Replaces the decoder, and returns its input."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> Any:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def _head_alone(model: Any) -> Any:
    """The model without its decoder: what it does to the last hidden states. Shares all weights with the model."""
    decoder = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    if not path:
        raise UnsupportedModel(f"{type(model).__name__}: its head cannot be told from its decoder")
    top = parent = _shallow(model)
    *above, last = path.split(".")
    for name in above:
        child = _shallow(parent.get_submodule(name))
        parent._modules[name] = child
        parent = child
    parent._modules[last] = _PassThrough()
    return top


def _shallow(module: nn.Module) -> nn.Module:
    """A copy whose children can be replaced without changing the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def load_bridge(
    directory: Path, settings: ModelSettings, device: torch.device, dtype: torch.dtype
) -> Bridged:
    """Raises UnsupportedModel if the model's results would differ from those under transformers, BadCheckpoint if its
    weights do not fit."""
    model = _load(directory, settings, dtype).to(device).eval()
    with torch.inference_mode():
        expected = eager_logits(model)
        probed = probe(model)
        attention = PagedAttention(probed)
        model.set_attn_implementation(attention.name)
        bridged = BridgedModel(model, attention)
        check_agreement(model, bridged, probed.layout, expected)
    text = model.config.get_text_config()
    return Bridged(bridged, probed.layout, int(text.vocab_size), context_limit(text), probed.sinks)


def _config_of_transformers(directory: Path) -> Any:
    """Raises UnsupportedModel if transformers does not know the model."""
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModel(
            f"{directory}: transformers cannot read its config.json: {brief(error)}"
        ) from error


def _dummy(config: Any, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:
        raise UnsupportedModel(f"transformers cannot make a {config.model_type}: {brief(error)}") from error


def _load(directory: Path, settings: ModelSettings, dtype: torch.dtype) -> Any:
    """Loads the model with transformers' own plain attention."""
    config = _config_of_transformers(directory)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"{directory}: {config.model_type!r} is no causal language model to transformers"
        )
    if settings.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return _dummy(config, dtype)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # files in torch's own format can run code
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except Exception as error:
        raise BadCheckpoint(f"{directory}: {brief(error)}") from error
    wrong = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if wrong:
        raise BadCheckpoint(f"{directory}: missing weights, or of another shape: {', '.join(wrong[:5])}")
    return model
