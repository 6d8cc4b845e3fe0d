"""Whole steps of a decoder in one call of the compiled kernels.

When Python runs a step of a small model layer by layer, most of the time goes into calling some twenty operators per
layer, and each call takes the GIL again. One call leaves the GIL free for the whole step.

Legend: N tokens, E hidden size, R rows of which logits are wanted, V vocabulary, A query and key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof
from typing import Any, cast

import torch
from torch import Tensor

from engine.attention.cpu_backend import CpuAttention, CpuAttentionStep
from engine.attention.interface import AttentionStep
from engine.cpu.adapters import PackedAdapters
from engine.cpu.library import (
    LARGEST_HEAD,
    MOST_WINDOWS,
    AdaptersC,
    ExpertsC,
    HeadsC,
    LatentsC,
    LayerC,
    LayerKVC,
    MatrixC,
    ModelC,
    Workers,
    check,
)
from engine.cpu.matrix import PackedLinears, PackedMatrix
from engine.models.adapters import Adapter
from engine.models.decoder import Decoder
from engine.models.latent_attention import LatentAttention
from engine.models.latent_config import NORM_EPS
from engine.models.layer_weights import LayerParts
from engine.models.linear import Linear
from engine.models.mlp import Experts
from engine.models.protocol import AdapterRows, CausalModel


def in_whole_steps(decoder: Decoder, linears: object, adapters: Sequence[Adapter]) -> CausalModel:
    """A WholeSteps around the decoder, or the decoder as it is, without adapters, if the compiled kernels cannot run
    it."""
    spec = decoder.spec
    if not isinstance(linears, PackedLinears):
        return decoder
    if spec.head_dim > LARGEST_HEAD or len(set(spec.windows)) > MOST_WINDOWS:
        return decoder
    return WholeSteps(decoder, linears.workers, PackedAdapters(adapters, spec, linears))


class WholeSteps:
    """An AdaptedModel: `decoder`, whose products are packed matrices, run by the kernels. With another kind of
    attention the decoder runs its layers itself, and has no adapters."""

    def __init__(self, decoder: Decoder, workers: Workers, adapters: PackedAdapters) -> None:
        spec, c = decoder.spec, workers.kernels.c
        self.kernels = workers.kernels
        self._decoder = decoder
        self._workers = workers
        self._adapters = adapters
        self._vocab_size = spec.vocab_size
        self._head = cast(PackedMatrix, decoder.head)
        self._kept: list[object] = []
        self._layers = (LayerC * spec.num_layers)(*(self._layer(parts) for parts in decoder.parts))
        self._kv: tuple[CpuAttention, Array[LayerKVC]] | None = None
        model = ModelC(
            layers=addressof(self._layers),
            rotations=decoder.rotary.rotations_P1C.data_ptr(),
            final_norm=self._floats(decoder.final_norm_E),
            head=addressof(self._head.matrix),
            heads=HeadsC(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.kv_layout.value_dim),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_positions=len(decoder.rotary.rotations_P1C),
            eps=spec.rms_norm_eps,
            scale=spec.scale,
        )
        self._handle = c.kedge_decoder_new(addressof(model))
        self._free = c.kedge_decoder_free

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._free(self._handle)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep) -> Tensor:
        if not isinstance(attend, CpuAttentionStep):
            return self._decoder.forward(tokens_N, positions_N, attend)
        return self._step(tokens_N, positions_N, attend, None)

    def forward_adapted(
        self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep, rows: Sequence[AdapterRows]
    ) -> Tensor:
        assert isinstance(attend, CpuAttentionStep), "models with adapters have the kernels' attention"
        assert sum(each.count for each in rows) == len(tokens_N)
        return self._step(tokens_N, positions_N, attend, self._adapters.of_rows(rows))

    def _step(
        self, tokens_N: Tensor, positions_N: Tensor, attend: CpuAttentionStep, adapters: AdaptersC | None
    ) -> Tensor:
        x_NE = self._decoder.embed(tokens_N)
        positions_N = positions_N.contiguous()
        assert len(x_NE) == len(positions_N) == attend.items_c.rows
        assert (x_NE.dtype, positions_N.dtype) == (torch.float32, torch.int64)
        outcome = self._workers.kernels.c.kedge_decoder_step(
            self._handle, self._workers.team, addressof(attend.items_c), self._layers_of(attend.backend),
            positions_N.data_ptr(), None if adapters is None else addressof(adapters), x_NE.data_ptr(),
        )  # fmt: skip
        check(outcome, f"a step of {len(x_NE)} tokens")
        return x_NE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        hidden_RE = hidden_RE.contiguous()
        rows = len(hidden_RE)
        logits_RV = torch.empty(rows, self._head.width)
        outcome = self._workers.kernels.c.kedge_decoder_head(
            self._handle, self._workers.team, rows, hidden_RE.data_ptr(), logits_RV.data_ptr()
        )
        check(outcome, f"logits of {rows} rows")
        return logits_RV[:, : self._vocab_size]

    def _layers_of(self, backend: CpuAttention) -> int:
        """The address of the layers' KV descriptions for the kernels; computed once for each pool."""
        if self._kv is None or self._kv[0] is not backend:
            self._kv = backend, backend.layers([parts.attention.traits for parts in self._decoder.parts])
        return addressof(self._kv[1])

    def _layer(self, parts: LayerParts) -> LayerC:
        layer = LayerC(
            attention_norm=self._floats(parts.attention_norm_E),
            mlp_norm=self._floats(parts.mlp_norm_E),
            out=self._matrices(parts.out),
        )
        attention, mlp = parts.attention, parts.mlp
        if isinstance(attention, LatentAttention):
            layer.qkv, layer.latents = self._matrices(attention.down), self._latents(attention)
        else:
            layer.qkv = self._matrices(attention.qkv)
            layer.head_norm = self._floats_or_none(attention.head_norm_AD)
        if isinstance(mlp, Experts):
            layer.experts = self._experts(mlp)
        dense = mlp.shared if isinstance(mlp, Experts) else mlp
        if dense is not None:
            layer.gate_up, layer.down = self._matrices(dense.gated), self._matrices(dense.down)
        return layer

    def _latents(self, attention: LatentAttention) -> int:
        latent = attention.latent
        described = LatentsC(
            None if attention.query_up is None else self._matrices(attention.query_up),
            self._matrices(*attention.key_ups),
            self._matrices(*attention.value_ups),
            self._matrices(*attention.plain_ups),
            self._floats_or_none(attention.query_norm),
            self._floats(attention.latent_norm_L),
            latent.query_rank or 0,
            latent.rank,
            latent.plain_dim,
            latent.rotary_dim,
            NORM_EPS,
            latent.scale,
        )
        return addressof(self._keep(described))

    def _experts(self, experts: Experts) -> int:
        routing = experts.routing
        described = ExpertsC(
            self._matrices(experts.router),
            self._matrices(*(mlp.gated for mlp in experts.mlps)),
            self._matrices(*(mlp.down for mlp in experts.mlps)),
            self._floats_or_none(experts.correction_X),
            len(experts.mlps),
            routing.top_k,
            routing.norm_topk,
            routing.sigmoid,
            routing.groups,
            routing.top_groups,
            routing.factor,
        )
        return addressof(self._keep(described))

    def _matrices(self, *linears: Linear) -> int:
        """The address of their matrices, one after another. The decoder keeps the weights alive."""
        matrices = (cast(PackedMatrix, each).matrix for each in linears)
        return addressof(self._keep((MatrixC * len(linears))(*matrices)))

    def _floats(self, weights: Tensor) -> int:
        """The address of a dense copy."""
        return int(self._keep(weights.float().contiguous()).data_ptr())

    def _floats_or_none(self, weights: Tensor | None) -> int | None:
        return None if weights is None else self._floats(weights)

    def _keep(self, thing: Any) -> Any:
        """Keeps it alive as long as this."""
        self._kept.append(thing)
        return thing
