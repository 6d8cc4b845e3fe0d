"""The small fused operators against the time their bytes take. Each result is compared with torch's in float32.

Sizes are those of an 8 B-parameter Llama, for a decode step of 64 rows and for 8,192 rows of prompts. The rows of a
decode step stay in the L2 cache from one operator to the next, and are timed that way; there the launch costs more than
the work.

Legend: N tokens, E hidden size, H query and key heads, K key/value heads, D head size, F inner size of the MLP,
R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import products
from benchmarks.gpu.attention_scene import Heads, Scene, WrongResult, decode_like
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.gpu.stage import Stage, time_device
from engine.attention.kv_writer import write_rows
from engine.attention.triton_backend import TritonAttention, TritonStep
from engine.kernels.decoder_ops import TritonOps, TritonRotation
from engine.kernels.sampling import pick_tokens
from engine.models.layers import RotaryTable
from engine.models.ops import TorchOps
from engine.models.rope import RopeSpec
from engine.runner.sample_table import SampleTable

TOLERANCE = 0.01
ROTATED_BYTES = 256 * 2**20
"""The inputs of a prompt's operators rotate over this much memory, several times the L2 cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int = 4096
    inner: int = 14_336
    heads: int = 40
    dim: int = 128
    vocab: int = 128_256
    few: int = 64
    many: int = 8192


DRY = Sizes(32, 48, 3, 16, 300, 2, 5)


@dataclass(frozen=True, slots=True)
class Operator:
    """`call(i)` works on the i-th of `inputs` sets. `check` returns the error on a fresh set."""

    name: str
    call: Callable[[int], Tensor]
    inputs: int
    num_bytes: int
    check: Callable[[], float]


def run(stage: Stage) -> None:
    sizes = DRY if stage.dry else Sizes()
    copied = copy_bandwidth(stage)
    parts: list[tuple[str, Callable[[], Operator]]] = []
    for rows in (sizes.few, sizes.many):
        parts += [(f"{make.__name__}, {rows} rows", partial(make, stage, sizes, rows)) for make in MAKERS]
    parts += [(f"pick, {kind}", partial(picks, stage, sizes, kind)) for kind in PICKS]
    for name, make in parts:
        if stage.wants(name):
            stage.attempt(name, partial(report, stage, copied, make))
    products.run(stage)


def report(stage: Stage, copied: float, make: Callable[[], Operator]) -> None:
    """Raises WrongResult."""
    operator = make()
    error = operator.check()
    if not error < TOLERANCE:
        raise WrongResult(f"{operator.name}: error {error:.3g}")
    timing = time_device(stage, operator.call, operator.inputs)
    floor_s = operator.num_bytes / copied
    stage.row(
        operator.name, timing.median_s * 1e6, "us", limit=floor_s * 1e6, share=floor_s / timing.median_s,
        note=f"by {timing.by}, {operator.inputs} inputs, error {error:.1e}",
        details={"bytes": operator.num_bytes, "seconds": timing.median_s, "best_s": timing.best_s},
    )  # fmt: skip


def norm(stage: Stage, sizes: Sizes, rows: int) -> Operator:
    """The norm with the residual sum: two tensors read, two written."""
    shape = (rows, sizes.hidden)
    sets = [
        (_draw(stage, shape, 1), _draw(stage, shape, 2))
        for _ in range(_inputs(stage, rows * sizes.hidden * 4))
    ]
    weight_E = _draw(stage, (sizes.hidden,), 3)
    ours, theirs = TritonOps().norm(weight_E, 1e-5), TorchOps().norm(weight_E.float(), 1e-5)

    def check() -> float:
        x_NE, delta_NE = _draw(stage, shape, 4), _draw(stage, shape, 5)
        wide_NE = (x_NE + delta_NE).float()
        found_NE = ours.add_(x_NE, delta_NE)
        return max(_error(found_NE, theirs(wide_NE)), _error(x_NE, wide_NE))

    num_bytes = 4 * rows * sizes.hidden * 2
    return Operator(
        f"rms_norm + residual, {rows} rows", lambda i: ours.add_(*sets[i]), len(sets), num_bytes, check
    )


def rotation(stage: Stage, sizes: Sizes, rows: int) -> Operator:
    """Rotates query and key heads in place; they lie beside the value heads."""
    shape = (rows, sizes.heads + 8, sizes.dim)
    size = rows * sizes.heads * sizes.dim
    sets = [_draw(stage, shape, 6)[:, : sizes.heads] for _ in range(_inputs(stage, size * 2))]
    rotations_N1C = RotaryTable(RopeSpec(), sizes.dim, rows, stage.device).rotations(
        torch.arange(rows, device=stage.device)
    )
    ours, theirs = TritonOps().rotation(None, 1e-5), TorchOps().rotation(None, 1e-5)

    def call(index: int) -> Tensor:
        ours(sets[index], rotations_N1C)
        return sets[index]

    def check() -> float:
        x_NHD = _draw(stage, shape, 7)[:, : sizes.heads]
        wide_NHD = x_NHD.float().contiguous()
        ours(x_NHD, rotations_N1C)
        theirs(wide_NHD, rotations_N1C)
        return _error(x_NHD, wide_NHD)

    num_bytes = 2 * size * 2 + rotations_N1C.nbytes
    return Operator(f"rotary, {rows} rows", call, len(sets), num_bytes, check)


def silu(stage: Stage, sizes: Sizes, rows: int) -> Operator:
    shape = (rows, 2 * sizes.inner)
    sets = [_draw(stage, shape, 8) for _ in range(_inputs(stage, rows * sizes.inner * 6))]
    ours = TritonOps()

    def check() -> float:
        drawn = _draw(stage, shape, 9)
        return _error(ours.silu_mul(drawn), TorchOps().silu_mul(drawn.float()))

    num_bytes = 3 * rows * sizes.inner * 2
    return Operator(f"silu * up, {rows} rows", lambda i: ours.silu_mul(sets[i]), len(sets), num_bytes, check)


def rotate_write(stage: Stage, sizes: Sizes, rows: int) -> Operator:
    """Rotation and write in one launch, as in the built-in models: every head is read and written once."""
    heads = Heads(4, 2, sizes.dim) if stage.dry else Heads()
    scene = Scene(stage, decode_like(rows, heads))
    step = TritonStep(TritonAttention(scene.pool), scene.tables)
    num_queries = sizes.heads - heads.kv
    shape = (rows, sizes.heads + heads.kv, sizes.dim)
    sets = [_draw(stage, shape, 11) for _ in scene.kv_LN2KD]
    rotations_N1C = RotaryTable(RopeSpec(), sizes.dim, rows, stage.device).rotations(
        torch.arange(rows, device=stage.device)
    )
    ours, theirs = TritonRotation(None, 1e-5), TorchOps().rotation(None, 1e-5)

    def call(index: int) -> Tensor:
        ours.into(sets[index], rotations_N1C, step.target(index))
        return sets[index]

    def check() -> float:
        scene.pool.full.kv_LJKSD.fill_(torch.nan)
        qkv_NAD = _draw(stage, shape, 12)
        wide_NAD = qkv_NAD.float()
        theirs(wide_NAD[:, : sizes.heads], rotations_N1C)
        ours.into(qkv_NAD, rotations_N1C, step.target(0))
        written_N2KD = scene.pool.layer(0)[scene.tables.slots_PN[0]]
        expected_N2KD = wide_NAD[:, num_queries:].reshape(written_N2KD.shape)
        turned = _error(qkv_NAD[:, :num_queries], wide_NAD[:, :num_queries])
        return max(turned, _error(written_N2KD, expected_N2KD))

    num_bytes = 2 * sets[0].numel() * 2 + rotations_N1C.nbytes
    return Operator(f"rotary + kv write, {rows} rows", call, len(sets), num_bytes, check)


def kv_write(stage: Stage, sizes: Sizes, rows: int) -> Operator:
    """Writes new keys and values into scattered slots of one layer; they are read and written once."""
    heads = Heads(4, 2, sizes.dim) if stage.dry else Heads()
    scene = Scene(stage, decode_like(rows, heads))
    step = TritonStep(TritonAttention(scene.pool), scene.tables)
    kv_NJKD = scene.kv_LN2KD[0]
    pool_L2KSD = scene.pool.full.kv_LJKSD

    def call(index: int) -> Tensor:
        target = step.target(index)
        write_rows(target.paged, target.place, scene.kv_LN2KD[index], target.slots_N)
        return pool_L2KSD

    def check() -> float:
        pool_L2KSD.fill_(torch.nan)
        call(0)
        return _error(scene.pool.layer(0)[scene.tables.slots_PN[0]], kv_NJKD)

    return Operator(f"kv_write, {rows} rows", call, len(scene.kv_LN2KD), 2 * kv_NJKD.numel() * 2, check)


MAKERS = (norm, rotation, rotate_write, silu, kv_write)
PICKS = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top-k 50": (1.0, 50, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
    "top-p 0.9 of flat rows": (1.0, 0, 0.9),
}
"""For each kind: temperature, top-k and top-p."""


def picks(stage: Stage, sizes: Sizes, kind: str) -> Operator:
    """Picks tokens; reads logits once. Flat rows, as a random model has them, make the nucleus wide: the slow case."""
    rows, device = sizes.few, stage.device
    sharpness = 0.5 if "flat" in kind else 4.0
    sets = [
        (_draw(stage, (rows, sizes.vocab), 10 + index) * sharpness).float()
        for index in range(_inputs(stage, rows * sizes.vocab * 4))
    ]
    temperature, top_k, top_p = PICKS[kind]
    table = SampleTable(
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.zeros(rows, device=device),
        torch.rand(rows, device=device, generator=stage.generator(9)),
    )
    out_R = torch.full((rows,), -1, dtype=torch.int64, device=device)

    def call(index: int) -> Tensor:
        pick_tokens(sets[index], table, out_R)
        return out_R

    def check() -> float:
        """0 if the filters allow every pick."""
        out_R.fill_(-1)
        call(0)
        logits_RV, index_R1 = sets[0], out_R.clamp(0)[:, None]
        more_R = (logits_RV > logits_RV.gather(1, index_R1)).sum(1)
        probs_RV = logits_RV.double().softmax(1)
        above_R = (probs_RV * (logits_RV > logits_RV.gather(1, index_R1))).sum(1)
        most = 1 if temperature == 0 else top_k or sizes.vocab
        good = (out_R >= 0) & (more_R < most) & (above_R <= top_p + 1e-4)
        return 0.0 if bool(good.all()) else 1.0

    name = f"pick of {rows} × {sizes.vocab:,}, {kind}"
    return Operator(name, call, len(sets), sets[0].nbytes, check)


def _inputs(stage: Stage, set_bytes: int) -> int:
    if stage.dry:
        return 2
    return 4 if set_bytes < 8 * 2**20 else max(2, -(-ROTATED_BYTES // set_bytes))


def _draw(stage: Stage, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, device=stage.device, generator=stage.generator(seed)).bfloat16()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
