"""Host memory for idle sessions' KV on a GPU: pinned when the runner starts, in blocks of one size.

Pinning takes the driver long, and may stop the device meanwhile, so it should not happen in service. torch's own
allocator of pinned memory rounds every size up to a power of two, and keeps what was freed for its size alone: after
sessions of many lengths it would hold a multiple of what is in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.device import fetch, pinned

BLOCK_BYTES = 8 * 2**20
SLAB_BYTES = 256 * 2**20
"""What is pinned in one call. A power of two, so torch rounds nothing up."""


class HostBlocks:
    """The blocks that nobody uses, and which tensors are in the others. Any thread may call any method.

    `size_bytes` is what all blocks together have at most. With 0 nothing is pinned beforehand, as on a CPU, where host
    memory needs no pinning.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._free = deque[Tensor]()
        self._lent: dict[int, Tensor] = {}  # by address
        for begin in range(0, size_bytes - BLOCK_BYTES + 1, SLAB_BYTES):
            whole = min(SLAB_BYTES, size_bytes - begin) // BLOCK_BYTES * BLOCK_BYTES
            self._free += pinned(whole, torch.uint8, device).view(-1, BLOCK_BYTES).unbind()

    def copy_of(self, part: Tensor) -> Tensor:
        """A copy of `part` in host memory, complete once the stream has passed it; `part` itself if it is there
        already. If no block is left, or `part` is larger than one, memory is pinned for it now."""
        try:
            block = self._free.pop() if part.nbytes <= BLOCK_BYTES else None
        except IndexError:
            block = None
        if block is None:
            return fetch(part)
        copy = block[: part.nbytes].view(part.dtype).view(part.shape)
        self._lent[copy.data_ptr()] = block
        return copy.copy_(part, non_blocking=True)

    def give_back(self, copies: Iterable[Tensor]) -> None:
        """Frees the blocks of these copies, which nobody may use any more."""
        for copy in copies:
            block = self._lent.pop(copy.data_ptr(), None)
            if block is not None:
                self._free.append(block)
