"""Paged attention cases: a pool of random keys and values in scattered pages, and a textbook result to check against.

Legend: N rows of the step, B items, T one item's tokens, H query heads, K key/value heads, D head size, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.gpu.stage import Stage, Timing, time_device
from engine.attention.interface import AttentionItem, AttentionTables, LayerTraits, TableAttention
from engine.attention.tables import tables_of
from engine.runner.kv_pool import FP8, KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings, KVDType

LAYERS = 2
"""Layers that are timed in turn. The first of them also cuts the step, so each carries half of a cut."""

TOLERANCE = 0.01
"""Largest error of bfloat16 products, as a share of the reference's norm."""

ITEMS_CHECKED, ROWS_CHECKED = 3, 4


@dataclass(frozen=True, slots=True)
class Heads:
    query: int = 64
    kv: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Case:
    """The new tokens of each item, and the item's length including them."""

    name: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: Heads = Heads()
    kv_dtype: KVDType = "auto"
    page_size: int = 16
    spare_items: int = 0
    """Padding items, as in a captured step."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that must be read, each once."""
        width = self.heads.dim + 4 if self.kv_dtype == "fp8" else 2 * self.heads.dim
        return sum(self.kv_lens) * 2 * self.heads.kv * width

    @property
    def operations(self) -> int:
        """Operations of both products under a causal mask; a multiplication and an addition count as two."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.query_lens, self.kv_lens, strict=True))
        return 4 * self.heads.query * self.heads.dim * pairs


def decode_like(rows: int, heads: Heads) -> Case:
    """A case with one new token each for many short sequences."""
    return Case(f"{rows} rows", (1,) * rows, (16,) * rows, heads)


class WrongResult(RuntimeError):
    """The timed call did not compute attention."""


class Scene:
    """One case on the card. The timed step itself writes its new keys and values."""

    def __init__(self, stage: Stage, case: Case, seed: int = 11) -> None:
        self.stage, self.case = stage, case
        heads, size, device = case.heads, case.page_size, stage.device
        pages_each = [-(-length // size) for length in case.kv_lens]
        order = np.random.default_rng(seed).permutation(sum(pages_each)).astype(np.int32)
        self.pages = np.split(order, np.cumsum(pages_each)[:-1])
        settings = CacheSettings(page_size=size, num_pages=len(order), kv_dtype=case.kv_dtype)
        layout = KVLayout(heads.kv, heads.dim, (None,) * LAYERS)
        self.pool = make_kv_pool(layout, settings, torch.bfloat16, device)
        generator = stage.generator(seed)
        rows = sum(case.query_lens)
        width = heads.query + 2 * heads.kv
        qkv = torch.randn(LAYERS, rows, width, heads.dim, device=device, generator=generator).bfloat16()
        self.q_LNHD = qkv[:, :, : heads.query]
        self.kv_LN2KD = qkv[:, :, heads.query :].view(LAYERS, rows, 2, heads.kv, heads.dim)
        slots = [self._slots(b)[kv - q : kv] for b, (q, kv) in enumerate(self._lens())]
        items = [
            AttentionItem(q, kv, pages, False)
            for (q, kv), pages in zip(self._lens(), self.pages, strict=True)
        ]
        slots_N = torch.from_numpy(np.concatenate(slots)).to(device)
        self.tables = _padded(tables_of(items, [slots_N], device), case.spare_items)
        self.traits = LayerTraits(heads.dim**-0.5)
        self.error = float("nan")

    def time(self, make: Callable[[KVPool], TableAttention], repeats: int = 11) -> Timing:
        """Times one layer's call. Raises WrongResult if an output is not written or wrong; leaves the error in
        `error`."""
        step = make(self.pool).plan(self.tables)
        fill_pool(self.pool, self.stage.generator(12))  # some backends zero it
        outputs: dict[int, Tensor] = {}

        def call(layer: int) -> None:
            outputs[layer] = step(layer, self.q_LNHD[layer], self.kv_LN2KD[layer], self.traits)

        def check(run: Callable[[], object]) -> None:
            for out_NA in outputs.values():
                out_NA.fill_(torch.nan)
            run()
            self.stage.synchronize()
            self.error = max(self._error(layer, out_NA) for layer, out_NA in outputs.items())

        timing = time_device(self.stage, call, LAYERS, repeats, check)
        if not self.error < TOLERANCE:
            raise WrongResult(f"{self.case.name}: error {self.error:.3g}")
        return timing

    def _error(self, layer: int, out_NA: Tensor) -> float:
        """The error of a few rows against float64; NaN if any row at all contains one."""
        if not bool(torch.isfinite(out_NA).all()):
            return float("nan")
        starts = np.concatenate([[0], np.cumsum(self.case.query_lens)])
        chosen = np.unique(np.linspace(0, len(self.case.kv_lens) - 1, ITEMS_CHECKED).astype(int))
        wrong, right = 0.0, 0.0
        for b in chosen.tolist():
            query_len, kv_len = self.case.query_lens[b], self.case.kv_lens[b]
            kv_T2KD = self._gathered(layer, b)
            for offset in np.unique(np.linspace(0, query_len - 1, ROWS_CHECKED).astype(int)).tolist():
                row = int(starts[b]) + offset
                expected = self._attend(self.q_LNHD[layer][row], kv_T2KD[: kv_len - query_len + offset + 1])
                wrong += float((out_NA[row].double() - expected).norm() ** 2)
                right += float(expected.norm() ** 2)
        return float((wrong / right) ** 0.5)

    def _attend(self, q_HD: Tensor, kv_T2KD: Tensor) -> Tensor:
        """Textbook attention of one row in float64: [H * D]."""
        group = self.case.heads.query // self.case.heads.kv
        keys_KTD, values_KTD = kv_T2KD.permute(1, 2, 0, 3)
        q_KGD = q_HD.double().view(-1, group, self.case.heads.dim)
        shares_KGT = torch.softmax(q_KGD @ keys_KTD.mT * self.traits.scale, -1)
        return torch.matmul(shares_KGT, values_KTD).flatten()

    def _gathered(self, layer: int, b: int) -> Tensor:
        """One item's keys and values [T, 2, K, D], float64."""
        slots = torch.from_numpy(self._slots(b)[: self.case.kv_lens[b]]).to(self.stage.device)
        paged, place = self.pool.places[layer]
        kv_2KSD = paged.kv_LJKSD[place]
        picked = kv_2KSD.view(torch.uint8)[:, :, slots].view(kv_2KSD.dtype).double()  # no indexing of fp8
        if paged.scales_LJKS is not None:
            picked *= paged.scales_LJKS[place][:, :, slots, None]
        return picked.permute(2, 0, 1, 3)

    def _slots(self, b: int) -> np.ndarray:
        size = self.case.page_size
        return (self.pages[b].astype(np.int64)[:, None] * size + np.arange(size)).ravel()

    def _lens(self) -> list[tuple[int, int]]:
        return list(zip(self.case.query_lens, self.case.kv_lens, strict=True))


def _padded(tables: AttentionTables, spare: int) -> AttentionTables:
    """The tables with room for `spare` more items, any of which might have all rows."""
    if not spare:
        return tables
    starts_B1, lens_B = tables.query_starts_B1, tables.kv_lens_B
    return replace(
        tables,
        query_starts_B1=torch.cat((starts_B1, starts_B1[-1:].expand(spare))),
        kv_lens_B=torch.cat((lens_B, lens_B.new_zeros(spare))),
        pages_PBM=tuple(pad(pages_BM, (0, 0, 0, spare), value=-1) for pages_BM in tables.pages_PBM),
        max_query_len=len(tables.slots_PN[0]),
    )


def fill_pool(pool: KVPool, generator: torch.Generator) -> None:
    """Fills the pool with random contents, part by part; fp8 with random scales."""
    paged = pool.full
    for part in paged.kv_LJKSD.flatten(0, 1):
        shape = part.shape
        drawn = torch.randn(shape, device=part.device, generator=generator, dtype=torch.bfloat16)
        part.copy_((drawn * 64).to(FP8) if part.dtype == FP8 else drawn)
    if paged.scales_LJKS is not None:
        paged.scales_LJKS.uniform_(0.5 / 64, 1.5 / 64, generator=generator)
