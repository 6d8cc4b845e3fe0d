"""Pages copied by the kernel have the same bits as those that torch copies, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.page_copy import PROGRAMS, WORDS, TritonPageCopier
from engine.runner.page_copier import TorchPageCopier


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    drawn = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(shape).to(device)


def host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    blank = torch.zeros(shape, dtype=dtype)
    return blank.pin_memory() if device.type == "cuda" else blank


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 3, 9, 16, 128), torch.bfloat16),
        ((1, 2, 1, 9, 16, 64), torch.uint8),
        ((3, 2, 2, 9, 4, 1), torch.float32),
        ((1, 2, 2, 9, 16, 80), torch.float16),
    ],
    ids=["bf16", "fp8", "scales", "heads of 80"],
)
@pytest.mark.parametrize("pages", [[4], [7, 2, 3, 8, 0], list(range(9))], ids=len)
def test_as_torch_copies(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, pages: list[int]
) -> None:
    pool = random_bits(shape, dtype, device)
    before, index = pool.clone(), torch.tensor(pages, device=device)
    part = (*shape[:3], len(pages), *shape[4:])
    saved = [host(part, dtype, device) for _ in range(2)]
    for copier, kept in zip((TritonPageCopier(), TorchPageCopier()), saved, strict=True):
        copier.save(pool, index, kept)
    other = index.flip(0).contiguous()
    loaded = [random_bits(shape, dtype, device, seed=2) for _ in range(2)]
    for copier, target in zip((TritonPageCopier(), TorchPageCopier()), loaded, strict=True):
        copier.load(target, other, saved[1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(saved[0].view(torch.uint8), saved[1].view(torch.uint8))
    assert torch.equal(loaded[0].view(torch.uint8), loaded[1].view(torch.uint8))
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


def test_more_units_than_all_programs_take_at_once(device: torch.device) -> None:
    pool = random_bits((1, 2, 1, 9, 4, 1), torch.float32, device)
    per_step = WORDS // 4
    pages = torch.arange(PROGRAMS * per_step + 3, device=device) % 9
    kept = host((1, 2, 1, len(pages), 4, 1), torch.float32, device)
    TritonPageCopier().save(pool, pages, kept)
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = pool.index_select(3, pages).cpu()
    assert torch.equal(kept.view(torch.int32), expected.view(torch.int32))


def test_no_pages(device: torch.device) -> None:
    pool = random_bits((1, 2, 1, 3, 16, 8), torch.bfloat16, device)
    before = pool.clone()
    none = torch.tensor([], dtype=torch.int64, device=device)
    empty = host((1, 2, 1, 0, 16, 8), torch.bfloat16, device)
    TritonPageCopier().save(pool, none, empty)
    TritonPageCopier().load(pool, none, empty)
    assert torch.equal(pool.view(torch.int16), before.view(torch.int16))
