"""How fast the attention of libraries is on the same shapes, with keys and values that are contiguous.

Legend: B items, H query heads, K key/value heads, D head size, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.attention_scene import Case
from benchmarks.gpu.stage import Stage, time_device

INPUTS = 2


def library_rates(stage: Stage, case: Case) -> dict[str, float]:
    """Operations per second by library, counting the case's causal operations. Items must be alike. Libraries that are
    not installed or cannot run the case are left out; torch's flash attention is always there."""
    ways = {"torch's flash": _torch_flash, "cuDNN": _cudnn, "FlashAttention 3": _flash_3}
    if stage.device.type != "cuda":
        ways = {"torch's flash": _torch_flash}
    rates = {}
    for name, way in ways.items():
        try:
            call = way(stage, case)
            rates[name] = case.operations / time_device(stage, call, INPUTS).median_s
        except (ImportError, OSError, RuntimeError) as error:
            print(f"{name}: {error}", flush=True)
    return rates


def _torch_flash(stage: Stage, case: Case) -> Callable[[int], Tensor]:
    if _is_causal(case) or stage.device.type != "cuda":
        return _sdpa(stage, case, SDPBackend.FLASH_ATTENTION)
    q_BTHD, k_BTKD, v_BTKD = _draw(stage, case)

    def call(_: int) -> Tensor:
        # With more keys than queries this operator's mask ends at the last key, as needed; SDPA's own mask does not.
        return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
            q_BTHD, k_BTKD, v_BTKD, None, None, case.query_lens[0], case.kv_lens[0], 0.0, True, False
        )[0]

    return call


def _cudnn(stage: Stage, case: Case) -> Callable[[int], Tensor]:
    if not _is_causal(case):
        raise RuntimeError("its mask does not end at the last key")
    return _sdpa(stage, case, SDPBackend.CUDNN_ATTENTION)


def _flash_3(stage: Stage, case: Case) -> Callable[[int], Tensor]:
    """FlashAttention 3 of the package fa3-fwd."""
    attend = import_module("fa3_fwd_interface").flash_attn_func
    q_BTHD, k_BTKD, v_BTKD = _draw(stage, case)
    return lambda _: attend(q_BTHD, k_BTKD, v_BTKD, causal=True)


def _sdpa(stage: Stage, case: Case, backend: SDPBackend) -> Callable[[int], Tensor]:
    q_BHTD, k_BKTD, v_BKTD = (drawn.transpose(1, 2) for drawn in _draw(stage, case))

    def call(_: int) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, is_causal=_is_causal(case), enable_gqa=True
            )

    return call


def _is_causal(case: Case) -> bool:
    return case.query_lens[0] == case.kv_lens[0]


def _draw(stage: Stage, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    if len({*case.query_lens}) > 1 or len({*case.kv_lens}) > 1:
        raise ValueError(f"{case.name}: items differ")
    generator, heads, batch = stage.generator(17), case.heads, len(case.query_lens)

    def draw(num_heads: int, tokens: int) -> Tensor:
        shape = (batch, tokens, num_heads, heads.dim)
        return torch.randn(shape, device=stage.device, generator=generator).bfloat16()

    keys = case.kv_lens[0]
    return draw(heads.query, case.query_lens[0]), draw(heads.kv, keys), draw(heads.kv, keys)
