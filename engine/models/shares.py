"""Which part of each tensor of a checkpoint a rank holds (tensor parallel).

Products are split as in Megatron-LM (Shoeybi et al. 2019). The first of a pair is split by rows, so that each rank
computes its own heads or its own part of the MLP; the second by columns, so that the ranks' results add up. Only rank 0
has what is added after such a sum (its bias).

Legend: V vocabulary, v = V / ranks rounded up, E hidden size, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.config import ModelSpec

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """Indices start .. stop-1 of dimension `dim`, followed by `padding` zeros. With `zeroed` it is all zeros."""

    dim: int
    start: int
    stop: int
    padding: int = 0
    zeroed: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """A view of the whole tensor, or a new one where there are zeros."""
        return self.padded(whole.narrow(self.dim, self.start, self.stop - self.start))

    def padded(self, read: Tensor) -> Tensor:
        """`read` is what lies at start .. stop-1."""
        if self.zeroed:
            return torch.zeros_like(read)
        if not self.padding:
            return read
        assert self.dim == 0
        return F.pad(read, (0, 0) * (read.dim() - 1) + (0, self.padding))


class Shares:
    """The parts of one rank of `size`. Raises UnsupportedModel if the model cannot be divided in this way."""

    def __init__(self, whole: ModelSpec, rank: int, size: int) -> None:
        self._whole = whole
        self._local = whole.shard(size)
        self._rank = rank
        self._size = size

    def part(self, name: str) -> Part | None:
        """The rank's part of a tensor; None if it has all of it."""
        if self._size == 1:
            return None
        if name == HEAD:
            return vocabulary_part(self._whole.vocab_size, self._rank, self._size)
        owner, _, kind = name.rpartition(".")
        projection = owner.rpartition(".")[2]
        local, dim = self._local, self._whole.head_dim
        by_rows = {
            "q_proj": (self._rank * local.num_heads * dim, local.num_heads * dim),
            "k_proj": (self._first_kv_head() * dim, local.num_kv_heads * dim),
            "v_proj": (self._first_kv_head() * dim, local.num_kv_heads * dim),
            "gate_proj": (self._rank * local.intermediate_size, local.intermediate_size),
            "up_proj": (self._rank * local.intermediate_size, local.intermediate_size),
        }
        by_columns = {
            "o_proj": (self._rank * local.num_heads * dim, local.num_heads * dim),
            "down_proj": (self._rank * local.intermediate_size, local.intermediate_size),
        }
        if projection in by_rows:
            start, count = by_rows[projection]
            return Part(0, start, start + count)
        if projection in by_columns:
            if kind == "bias":
                return Part(0, 0, self._whole.hidden_size, zeroed=True) if self._rank else None
            start, count = by_columns[projection]
            return Part(1, start, start + count)
        return None

    def _first_kv_head(self) -> int:
        """With fewer heads than ranks, the head that the rank's query heads share."""
        return self._rank * self._whole.num_kv_heads // self._size


def vocabulary_part(vocab_size: int, rank: int, size: int) -> Part:
    """Equal shares of rows; those of the last ranks are padded if the rows do not divide evenly."""
    share = -(-vocab_size // size)
    start, stop = (min(vocab_size, share * index) for index in (rank, rank + 1))
    return Part(0, start, stop, share - (stop - start))


def vocabulary_share(whole_VE: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows [v, E] of the head, when the embedding serves as the head."""
    return whole_VE if size == 1 else vocabulary_part(whole_VE.shape[0], rank, size).of(whole_VE)
