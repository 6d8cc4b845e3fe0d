"""Finds what a model of `transformers` needs of attention by running it, and checks that the bridge provides it.

A short forward pass with a recording function in place of attention shows the layers, their heads and everything they
ask for. Masks show the windows: transformers describes a mask as a function of query and key position. The recorder
judges that function, and passes its verdict to the layers in place of the mask. A second pass, in chunks and through
pages, must then give the same result as the model's own attention. That reveals a model that keeps more than keys and
values between tokens, or mixes requests of a step.

Legend: N tokens, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.interface import AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.models.errors import UnsupportedModel
from engine.models.protocol import CausalModel
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.settings import CacheSettings

DEFAULT_CONTEXT = 2048
"""Context length in tokens, where a configuration sets no limit."""

KNOWN = frozenset({"scaling", "softcap", "s_aux", "sliding_window", "dropout", "is_causal", "position_ids"})
"""Arguments of attention whose values matter; all other arguments must have no value (None, False or zero)."""

HARMLESS = frozenset(
    {"output_attentions", "use_cache", "return_dict", "output_router_logits", "cache_position"}
)

CAUSAL, STRANGE = 0, -1
"""Verdicts on a mask; a positive one is a sliding window in tokens."""

SEQUENCES = ((3, 14, 15, 92, 65, 35, 89), (79, 32, 38, 46, 26))
"""Tokens of the trial; taken modulo the vocabulary's size, they fit any vocabulary."""

STEPS = (((0, 0, 4),), ((0, 4, 5), (1, 0, 4)), ((0, 5, 7), (1, 4, 5)))
"""Steps of the trial: (sequence, from, to) of each item."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest relative error of logits."""


class _Strange(Exception):
    """The layer asks for something that pages cannot give."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """`places` maps a layer's number in transformers to its place in `layout`. `sinks` is the most
    heads with attention sinks of a layer, 0 without any."""

    layout: KVLayout
    places: dict[int, int]
    sinks: int


@dataclass(slots=True)
class _Layer:
    number: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(slots=True)
class _Recorder:
    """Stands in for attention and notes what it is asked for. Returns zeros."""

    context_len: int
    sinks: int = 0
    layers: list[_Layer] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        number = getattr(module, "layer_idx", None)
        if number is None or any(layer.number == number for layer in self.layers):
            raise _Strange(f"{type(module).__name__} has no layer number of its own")
        strange = [name for name, given in kwargs.items() if name not in KNOWN | HARMLESS and _says(given)]
        if strange:
            raise _Strange(f"layer {number} asks attention for {', '.join(sorted(strange))}")
        if key.shape != (1, value.shape[1], query.shape[2], key.shape[3]) or query.shape[1] % key.shape[1]:
            raise _Strange(f"layer {number} has queries {[*query.shape]} and keys {[*key.shape]}")
        causal = kwargs.get("is_causal")
        if attention_mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _Strange(f"layer {number} is not causal")
        if (sinks_H := kwargs.get("s_aux")) is not None:
            self.sinks = max(self.sinks, len(sinks_H))
        window = self._window(number, attention_mask, kwargs.get("sliding_window"))
        self.layers.append(_Layer(number, key.shape[1], max(key.shape[3], value.shape[3]), window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, mask_function: Callable[..., Any], q_length: int, kv_length: int, **rest: Any) -> Tensor:
        """In place of a mask: the verdict's number in every element, which survives a change of dtype or shape."""
        self.verdicts.append(mask_verdict(mask_function, self.context_len))
        size = (1, 1, q_length, kv_length)
        return torch.full(size, float(len(self.verdicts) - 1), device=rest.get("device"))

    def _window(self, number: int, mask: Tensor | None, said: int | None) -> int | None:
        """The window by the mask, which is what transformers uses; without a mask, the window that the layer names."""
        window = said
        if mask is not None:
            wide = mask.float().flatten()
            number_of_verdict = int(wide[0]) if bool((wide == wide[0].floor()).all()) else -1
            known = 0 <= number_of_verdict < len(self.verdicts)
            verdict = self.verdicts[number_of_verdict] if known else STRANGE
            if verdict == STRANGE:
                raise _Strange(f"the mask of layer {number} is neither causal nor a sliding window")
            window = None if verdict == CAUSAL else verdict
        return None if window is None or window >= self.context_len else window


def _says(given: Any) -> bool:
    return isinstance(given, Tensor) or (given is not None and bool(given))


def mask_verdict(mask_function: Callable[..., Any], context_len: int) -> int:
    """The verdict on a mask function (batch, head, query position, key position) -> visible."""
    zero, last = torch.tensor(0), context_len - 1
    window: int | None = None
    for position in (last, 0, 1, context_len // 3, context_len // 2 + 1):
        keys_T = torch.arange(position + 2)
        try:
            visible = mask_function(zero, zero, torch.tensor(position), keys_T)
        except Exception:
            return STRANGE
        visible_T = torch.as_tensor(visible).expand(position + 2)
        if window is None:
            window = int(visible_T.sum())
        if not torch.equal(visible_T, (keys_T <= position) & (keys_T > position - window)):
            return STRANGE
    assert window is not None
    return CAUSAL if window >= context_len else window


def probe(model: Any) -> ProbedModel:
    """Leaves the model with the recording attention. Raises UnsupportedModel."""
    name = f"kedge_probe_{uuid.uuid4().hex}"
    recorder = _Recorder(context_limit(model.config.get_text_config()))
    AttentionInterface.register(name, recorder)
    AttentionMaskInterface.register(name, recorder.mask)
    what = type(model).__name__
    try:
        model.set_attn_implementation(name)
        _run_whole(model.base_model, SEQUENCES[0])
    except _Strange as error:
        raise UnsupportedModel(f"{what}: {error}") from error
    except Exception as error:
        raise UnsupportedModel(f"{what} does not run on another attention: {brief(error)}") from error
    layers = recorder.layers
    if not layers:
        raise UnsupportedModel(f"{what}: its attention does not go through transformers' attention interface")
    expected = int(model.config.get_text_config().num_hidden_layers)
    if len(layers) != expected:
        raise UnsupportedModel(
            f"{what}: {len(layers)} of its {expected} layers attend; what others keep between tokens has no pages"
        )
    if len({layer.num_kv_heads for layer in layers}) > 1:
        raise UnsupportedModel(f"{what}: its layers differ in their number of key/value heads")
    layout = KVLayout(
        layers[0].num_kv_heads,
        max(layer.head_dim for layer in layers),
        tuple(layer.window for layer in layers),
    )
    return ProbedModel(layout, {layer.number: place for place, layer in enumerate(layers)}, recorder.sinks)


def context_limit(config: Any) -> int:
    """Context length in tokens. Rotary frequencies that change with the longest sequence of a step would make a request
    depend on others in the step. So such models are limited to the range in which the frequencies stay the same."""
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit


def eager_logits(model: Any) -> list[Tensor]:
    """Logits of the model as it is, for every token [N, V] of each trial sequence."""
    try:
        return [_run_whole(model, tokens).logits[0].float() for tokens in SEQUENCES]
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} does not run on tokens and positions: {brief(error)}"
        ) from error


def _run_whole(model: Any, tokens: tuple[int, ...]) -> Any:
    tokens_N = _trial_tokens(model, tokens)
    positions_N = torch.arange(len(tokens), device=tokens_N.device)
    return model(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)


def _trial_tokens(model: Any, tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor(tokens, device=model.device) % int(model.config.get_text_config().vocab_size)


def check_agreement(model: Any, bridged: CausalModel, layout: KVLayout, expected: list[Tensor]) -> None:
    """Runs the trial sequences in chunks, side by side, over scattered pages. Raises UnsupportedModel if the logits
    are not those of the model's own attention."""
    pool = make_kv_pool(
        layout, CacheSettings(page_size=2, num_pages=8, window_ratio=1.0), model.dtype, model.device
    )
    for paged in (pool.full, pool.window):
        if paged is not None:
            paged.kv_LJKSD.fill_(torch.nan)
    attention = TorchAttention(pool)
    tables = (np.asarray([6, 1, 4, 0], dtype=np.int32), np.asarray([5, 7, 2], dtype=np.int32))
    worst = 0.0
    for step in STEPS:
        items = [AttentionItem(end - start, end, tables[n], False, tables[n]) for n, start, end in step]
        slots_N = [int(tables[n][t // 2]) * 2 + t % 2 for n, start, end in step for t in range(start, end)]
        places = [t for _, start, end in step for t in range(start, end)]
        tokens = [SEQUENCES[n][t] for n, start, end in step for t in range(start, end)]
        attend = attention.begin(items, [torch.tensor(slots_N, device=model.device)] * 2)
        try:
            hidden_NE = bridged.forward(
                _trial_tokens(model, tuple(tokens)), torch.tensor(places, device=model.device), attend
            )
            logits_NV = bridged.logits(hidden_NE)
        except Exception as error:
            raise UnsupportedModel(
                f"{type(model).__name__} does not run over pages: {brief(error)}"
            ) from error
        wanted_NV = torch.cat([expected[n][start:end] for n, start, end in step])
        worst = max(worst, float((logits_NV - wanted_NV).norm() / wanted_NV.norm().clamp_min(1e-9)))
    if not worst <= TOLERANCE.get(model.dtype, 0.15):
        raise UnsupportedModel(
            f"{type(model).__name__} over pages differs from itself by {worst:.2g}: it keeps more than keys and "
            "values between tokens, or mixes the requests of a step"
        )


def brief(error: Exception) -> str:
    """The first line of an error of transformers, which may have paragraphs."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
