"""Worker processes that train one model together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """Worker processes with one thread each. They share each batch and average their gradients.

    Two single-threaded workers wait for each other once a step. Two threads of one worker would wait at every
    operation, which is many times slower when anything else uses a core.
    """

    rank: int = 0
    size: int = 1

    def mean(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def mean_gradients(self, model: torch.nn.Module) -> None:
        if self.size == 1:
            return
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = self.mean(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
