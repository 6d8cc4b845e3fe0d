"""Loads the model of the settings, with what the engine must know about it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.cpu.matrix import PackedLinears
from engine.cpu.steps import WholeSteps, in_whole_steps
from engine.device import (
    activation_dtype,
    compute_capability,
    is_gpu,
    resolve_device,
    resolve_dtype,
    seconds_of_each,
    use_cpu_threads,
)
from engine.kernels.choose import FIRST_WITH_FP8, triton_build, triton_trouble
from engine.models.adapters import read_adapters
from engine.models.config import ModelSpec, parse_spec, read_config, read_json
from engine.models.decoder import Decoder
from engine.models.device_linear import FixedLinears, Linears, choose_linears
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.fingerprint import checkpoint_fingerprint, dummy_fingerprint
from engine.models.hub import find_model
from engine.models.linear import LinearFactory
from engine.models.measured_linear import MeasuredGated
from engine.models.ops import DecoderOps, TorchOps
from engine.models.protocol import AdaptedModel, CausalModel
from engine.models.quantized_matrix import QuantizedLinears
from engine.models.shares import Shares
from engine.models.weights import CHECKPOINT_DTYPES, CheckpointWeights, DummyWeights, weight_files
from engine.parallel.ranks import OneRank, RankGroup
from engine.runner.kv_pool import KVLayout
from engine.settings import LinearName, ModelSettings


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`layout` and `dtype` say what KV the model keeps; `dtype` is also that of activations. On a GPU a `native`
    model's passes never need the host, so CUDA graphs of them can be captured. `about` says what its products run on,
    and why, where there was a choice. `fingerprint` is that of configuration and weights of the whole model;
    `weights_dtype` is how they are held here, but for matrices that stay as they are stored (`keeps_quantized`).
    `sinks` is the most heads with attention sinks of a layer, `group` how many query heads of a native model share a
    key head. If the model was loaded to be `deterministic`, that is the build of the kernels whose order of sums it
    has. `adapters` are the fingerprints of those that requests may name; the model is an AdaptedModel if there are
    any."""

    model: CausalModel
    layout: KVLayout
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    max_context_len: int
    native: bool
    fingerprint: str
    weights_dtype: torch.dtype
    sinks: int = 0
    group: int = 1
    keeps_quantized: bool = False
    deterministic: str | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)


def load_model(
    settings: ModelSettings,
    make_linear: LinearFactory | None = None,
    *,
    ops: DecoderOps | None = None,
    ranks: RankGroup | None = None,
    linear: LinearName = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """A native family if the model belongs to one, else the model as transformers has it, over the bridge.

    `make_linear` replaces what `linear` selects, `ops` replaces torch's own small operators. With several `ranks`, each
    loads its share, and the result describes that share. `deterministic`: a row's results do not depend on the rows
    beside it. Raises ModelError (not found, not supported, weights that do not fit) or DeviceUnavailable.
    """
    use_cpu_threads(settings.num_threads)
    directory = find_model(settings.path, settings.revision)
    config = read_config(directory)
    device = resolve_device(settings.device)
    ranks = ranks or OneRank()
    try:
        spec = native_spec(config, device)
    except UnsupportedModel as refusal:
        if settings.keep_fp8:
            raise UnsupportedModel(f"model.keep_fp8 is for native models ({refusal})") from refusal
        if ranks.size > 1:
            raise UnsupportedModel(
                f"tensor_parallel {ranks.size}: only native families are shared out to ranks ({refusal})"
            ) from refusal
        if deterministic:
            raise UnsupportedModel(f"execution.deterministic is for native models ({refusal})") from refusal
        if settings.adapters:
            raise UnsupportedModel(f"model.adapters are for native models ({refusal})") from refusal
        return _load_bridged(directory, config, settings, device, refusal)
    if deterministic and ranks.size > 1:
        raise UnsupportedModel(f"execution.deterministic: {ranks.size} ranks sum in an order of their own")
    if settings.adapters and spec.latent is not None:
        raise UnsupportedModel("model.adapters are not implemented for latent attention")
    weights_dtype = resolve_dtype(settings.dtype, device, CHECKPOINT_DTYPES[spec.checkpoint_dtype])
    if make_linear is None:
        linears = choose_linears(linear, device, weights_dtype, deterministic=deterministic)
    else:
        assert not deterministic, "what is given may sum in any order"
        linears = make_linear if isinstance(make_linear, Linears) else FixedLinears(make_linear, {})
    loaded = _load_native(directory, spec, settings, device, weights_dtype, linears, ops or TorchOps(), ranks)
    return _checked_deterministic(loaded) if deterministic else loaded


def native_spec(config: Mapping[str, Any], device: torch.device) -> ModelSpec:
    """Raises UnsupportedModel if no native family runs the model on that device."""
    spec = parse_spec(config)
    if is_gpu(device) and (spec.experts is not None or spec.latent is not None):
        what = "experts are" if spec.latent is None else "latent attention is"
        raise UnsupportedModel(f"{what} native on a CPU only")
    return spec


def _checked_deterministic(loaded: LoadedModel) -> LoadedModel:
    if is_gpu(loaded.device):
        return replace(loaded, deterministic=triton_build(loaded.device))
    if not isinstance(loaded.model, WholeSteps):
        raise UnsupportedModel("execution.deterministic: the compiled kernels cannot run this model's steps")
    return replace(loaded, deterministic=loaded.model.kernels.build)


def _load_native(
    directory: Path,
    whole: ModelSpec,
    settings: ModelSettings,
    device: torch.device,
    weights_dtype: torch.dtype,
    linears: Linears,
    ops: DecoderOps,
    ranks: RankGroup,
) -> LoadedModel:
    dtype = activation_dtype(device, weights_dtype)
    if settings.keep_fp8:
        linears = _keeping_fp8(linears, whole, ranks, device, dtype)
    shares, spec = Shares(whole, ranks.rank, ranks.size), whole.shard(ranks.size)
    with torch.inference_mode():
        if settings.load_format == "dummy":
            dummy = DummyWeights(whole, weights_dtype, settings.seed, device, shares)
            model = Decoder(spec, dummy, linears, device, dtype, ops, ranks)
        else:
            with closing(CheckpointWeights(directory, whole, weights_dtype, device, shares)) as source:
                model = Decoder(spec, source, linears, device, dtype, ops, ranks)
        adapters = read_adapters(settings.adapters, whole, weights_dtype)
        runs = model if ranks.size > 1 else in_whole_steps(model, linears, adapters)
    if adapters and not isinstance(runs, AdaptedModel):
        reason = _why_not_whole(device, ranks, linears)
        raise UnsupportedModel(f"model.adapters need the compiled CPU kernels: {reason}")
    return LoadedModel(
        model=runs,
        layout=spec.kv_layout,
        vocab_size=spec.vocab_size,
        device=device,
        dtype=dtype,
        eos_token_ids=read_eos_ids(directory),
        max_context_len=spec.max_context_len,
        native=True,
        fingerprint=_fingerprint(directory, settings, device),
        weights_dtype=weights_dtype,
        sinks=spec.num_heads if spec.sinks else 0,
        group=spec.num_heads // spec.num_kv_heads,
        keeps_quantized=spec.is_quantized and ranks.size == 1 and isinstance(linears, QuantizedLinears),
        about=linears.describe(),
        adapters={adapter.name: adapter.fingerprint for adapter in adapters},
    )


def _why_not_whole(device: torch.device, ranks: RankGroup, linears: Linears) -> str:
    """Why a model does not run in whole steps."""
    if is_gpu(device):
        return "the model is on a GPU (model.device)"
    if ranks.size > 1:
        return f"tensor_parallel {ranks.size} runs without them"
    if not isinstance(linears, PackedLinears):
        return linears.describe().get("linear_reason", "the products are given")
    return "they cannot run this model's steps"


def _keeping_fp8(
    linears: Linears, whole: ModelSpec, ranks: RankGroup, device: torch.device, dtype: torch.dtype
) -> Linears:
    """Raises UnsupportedModel. It needs a card that converts fp8, and products that are measured: Triton runs there."""
    if whole.fp8 is None:
        raise UnsupportedModel("model.keep_fp8: the checkpoint's matrices are not in fp8")
    if ranks.size > 1:
        raise UnsupportedModel("model.keep_fp8: a rank of several multiplies its share out")
    capability = compute_capability(device)
    if capability is None or capability < FIRST_WITH_FP8:
        has = "a CPU" if capability is None else f"one with {capability / 10}"
        raise UnsupportedModel(
            f"model.keep_fp8 needs a GPU with compute capability {FIRST_WITH_FP8 / 10}, this is {has}"
        )
    if not isinstance(linears, MeasuredGated):
        reason = triton_trouble(device) or linears.describe().get("linear_reason", "they are given")
        raise UnsupportedModel(
            f"model.keep_fp8 needs products that are chosen by timing, not torch's: {reason}"
        )
    from engine.models.fp8_linear import KeepingLinears  # needs Triton

    return KeepingLinears(linears, dtype, partial(seconds_of_each, device))


def _load_bridged(
    directory: Path,
    config: Mapping[str, Any],
    settings: ModelSettings,
    device: torch.device,
    refusal: UnsupportedModel,
) -> LoadedModel:
    """`refusal` says why the model is not native."""
    from engine.models.bridge import load_bridge  # imports all of transformers, which takes seconds

    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = resolve_dtype(settings.dtype, device, CHECKPOINT_DTYPES.get(name, torch.bfloat16))
    try:
        bridged = load_bridge(directory, settings, device, dtype)
    except (UnsupportedModel, BadCheckpoint) as error:
        raise type(error)(f"{error} (and not native: {refusal})") from error
    return LoadedModel(
        model=bridged.model,
        layout=bridged.layout,
        vocab_size=bridged.vocab_size,
        device=device,
        dtype=dtype,
        eos_token_ids=read_eos_ids(directory),
        max_context_len=bridged.max_context_len,
        native=False,
        fingerprint=_fingerprint(directory, settings, device),
        weights_dtype=dtype,
        sinks=bridged.sinks,
    )


def _fingerprint(directory: Path, settings: ModelSettings, device: torch.device) -> str:
    config = read_config(directory)
    if settings.load_format == "dummy":
        return dummy_fingerprint(config, settings.seed, device.type)
    return checkpoint_fingerprint(config, weight_files(directory))


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Ids that end generation: those of generation_config.json, else of config.json. Raises UnsupportedModel."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            value = read_json(directory / name).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(each) is int for each in ids):
                raise UnsupportedModel(
                    f"{name}: eos_token_id must be an integer or a list of them, not {value!r}"
                )
            return frozenset(ids)
    return frozenset()
