"""What the pool holds of a step's keys and values, slot by slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.kv_writer import write_rows
from engine.runner.kv_pool import FP8, KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.reference import ReferenceAttention, ReferenceStep
from tests.unit.engine.attention.stage import DEVICE


def make_pool(kv_heads: int, dim: int, dtype: torch.dtype, fp8: bool) -> KVPool:
    settings = CacheSettings(3, 8, kv_dtype="fp8" if fp8 else "auto")
    pool = make_kv_pool(KVLayout(kv_heads, dim, (None, None)), settings, dtype, DEVICE)
    pool.full.kv_LJKSD.view(torch.uint8).fill_(0x55)
    if pool.full.scales_LJKS is not None:
        pool.full.scales_LJKS.fill_(-1)
    return pool


def write(pool: KVPool, layer: int, kv_NJKD: Tensor, slots: list[int]) -> None:
    paged, place = pool.places[layer]
    write_rows(paged, place, kv_NJKD.to(DEVICE), torch.tensor(slots, device=DEVICE))


def write_by_hand(pool: KVPool, layer: int, kv_NJKD: Tensor, slots: list[int]) -> None:
    step = ReferenceAttention(pool).begin([], [torch.tensor(slots)])
    assert isinstance(step, ReferenceStep)
    step.write(layer, kv_NJKD.to(DEVICE))


def check(kv_NJKD: Tensor, slots: list[int], fp8: bool) -> KVPool:
    """Compares all values, also those that are not written and so must not change."""
    _, _, kv_heads, dim = kv_NJKD.shape
    pools = [make_pool(kv_heads, dim, kv_NJKD.dtype, fp8) for _ in range(2)]
    for pool, how in zip(pools, (write, write_by_hand), strict=True):
        how(pool, 1, kv_NJKD, slots)
    got, want = pools
    assert torch.equal(got.full.kv_LJKSD.double(), want.full.kv_LJKSD.double())
    if fp8:
        assert got.full.scales_LJKS is not None
        assert want.full.scales_LJKS is not None
        torch.testing.assert_close(got.full.scales_LJKS, want.full.scales_LJKS, rtol=3e-7, atol=0.0)
    return got


def draw(rows: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 2, kv_heads, dim, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (3, 80), (8, 128), (40, 192), (2, 4)])
def test_slots_are_written_and_no_others(kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    check(draw(4, kv_heads, dim, dtype), [7, 0, 23, 5], False)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from numpy, for rows that are read but not written
def test_rows_without_a_slot_are_not_written() -> None:
    kv_NJKD = draw(4, 2, 16)
    kv_NJKD[1] = torch.nan
    for fp8 in (False, True):
        check(kv_NJKD, [3, -1, 20, -1], fp8)


@pytest.mark.parametrize("rows", [1, 5])
def test_strided_rows(rows: int) -> None:
    fused = draw(rows, 6, 16).flatten(1, 2)
    check(fused[:, 8:].view(rows, 2, 2, 16), list(range(rows)), False)
    check(draw(rows, 2, 16).permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), list(range(rows)), False)
    check(draw(rows, 16, 2).transpose(2, 3), list(range(rows)), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(dtype: torch.dtype) -> None:
    """Values of every size, including ties and subnormals. Keys and values of each head have scales of their own."""
    kv_NJKD = draw(6, 3, 80)
    kv_NJKD[1] *= 1e-4
    kv_NJKD[2] *= 1e4
    kv_NJKD[3, 0, 1] = 0
    kv_NJKD[4] = kv_NJKD[4] ** 9  # small compared with the largest
    kv_NJKD[5, 1, 2] = torch.arange(80) / 64 * 448 / 79 * 64
    pool = check(kv_NJKD.to(dtype), [2, 3, 4, 9, 11, 23], True)
    assert pool.full.scales_LJKS is not None
    assert pool.full.scales_LJKS[1, 0, 1, 9] == 1
    restored = pool.full.kv_LJKSD[1].float() * pool.full.scales_LJKS[1][..., None]
    for row, slot in enumerate([2, 3, 4, 9, 11, 23]):
        want = kv_NJKD[row].to(dtype).float()
        largest = want.abs().amax(-1, keepdim=True)
        error = (restored[:, :, slot].cpu() - want).abs()
        assert (error <= torch.maximum(want.abs() / 16, largest * 2**-9 / 448)).all()


def test_every_fp8_value_is_kept() -> None:
    """Heads whose largest value is 448 are stored unchanged."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = values[values.isfinite()]
    kv_NJKD = torch.cat((finite, torch.tensor([448.0, -448.0]))).expand(1, 2, 1, -1)
    pool = check(kv_NJKD, [0], True)
    assert torch.equal(pool.full.kv_LJKSD[1, 0, 0, 0].float().cpu(), kv_NJKD[0, 0, 0])
