"""How pages of a KV pool get to host memory and back: torch's operators anywhere, a kernel on GPUs where Triton works.

Legend: L layers, K key/value heads, P pages of the pool, n pages copied, p tokens of a page, D head size.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from engine.device import is_gpu
from engine.kernels.choose import triton_trouble

logger = logging.getLogger(__name__)

PAGE_DIM = 3


class PageCopier(Protocol):
    """Copies in the current stream. Host memory of a GPU's copies is pinned, and is read or written once the stream has
    passed the call."""

    def save(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        """Fills `host_L2KnpD` with the pages."""

    def load(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        """Fills the pages from `host_L2KnpD`."""


class TorchPageCopier:
    """On a GPU it gathers pages in device memory first."""

    def save(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        if pool_L2KPpD.device == host_L2KnpD.device:
            torch.index_select(pool_L2KPpD, PAGE_DIM, pages_n, out=host_L2KnpD)
        else:
            host_L2KnpD.copy_(pool_L2KPpD.index_select(PAGE_DIM, pages_n), non_blocking=True)

    def load(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        part_L2KnpD = host_L2KnpD.to(pool_L2KPpD.device, non_blocking=True)
        pool_L2KPpD.index_copy_(PAGE_DIM, pages_n, part_L2KnpD)


def choose_page_copier(device: torch.device) -> PageCopier:
    if not is_gpu(device):
        return TorchPageCopier()
    trouble = triton_trouble(device)
    if trouble is not None:
        logger.warning("KV is copied to host memory by torch's operators, triton: %s", trouble)
        return TorchPageCopier()
    from engine.kernels.page_copy import TritonPageCopier

    return TritonPageCopier()
