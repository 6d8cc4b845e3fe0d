"""How fast torch's own attention is on the same shapes, with keys and values that are contiguous.

Legend: B items, H query heads, K key/value heads, D head size, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.attention_scene import Case
from benchmarks.gpu.stage import Stage, time_device

INPUTS = 2


def flash_rate(stage: Stage, case: Case) -> float:
    """Operations per second of torch's flash attention, counting the case's causal operations. Items must be alike."""
    q_BHTD, k_BKTD, v_BKTD = _draw(stage, case)
    causal = case.query_lens[0] == case.kv_lens[0]
    if causal or stage.device.type != "cuda":
        return _rate(stage, case, SDPBackend.FLASH_ATTENTION, causal)

    def call(_: int) -> Tensor:
        # With more keys than queries this operator's mask ends at the last key, as needed; SDPA's own mask does not.
        return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
            q_BHTD.transpose(1, 2), k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2), None, None,
            case.query_lens[0], case.kv_lens[0], 0.0, True, False,
        )[0]  # fmt: skip

    return case.operations / time_device(stage, call, INPUTS).median_s


def cudnn_rate(stage: Stage, case: Case) -> float | None:
    """None if cuDNN's attention cannot run the case."""
    if stage.device.type != "cuda" or case.query_lens[0] != case.kv_lens[0]:
        return None
    try:
        return _rate(stage, case, SDPBackend.CUDNN_ATTENTION, causal=True)
    except RuntimeError as error:
        print(f"cuDNN: {error}", flush=True)
        return None


def _rate(stage: Stage, case: Case, backend: SDPBackend, causal: bool) -> float:
    q_BHTD, k_BKTD, v_BKTD = _draw(stage, case)
    with sdpa_kernel(backend):
        timing = time_device(
            stage,
            lambda _: scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=causal, enable_gqa=True),
            INPUTS,
        )
    return case.operations / timing.median_s


def _draw(stage: Stage, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    if len({*case.query_lens}) > 1 or len({*case.kv_lens}) > 1:
        raise ValueError(f"{case.name}: items differ")
    generator, heads, batch = stage.generator(17), case.heads, len(case.query_lens)

    def draw(num_heads: int, tokens: int) -> Tensor:
        shape = (batch, tokens, num_heads, heads.dim)
        drawn = torch.randn(shape, device=stage.device, generator=generator).bfloat16()
        return drawn.transpose(1, 2)

    keys = case.kv_lens[0]
    return draw(heads.query, case.query_lens[0]), draw(heads.kv, keys), draw(heads.kv, keys)
