"""Sequences that are attended to in one pass each, or together in steps of random chunks.

Legend: N tokens of a sequence or of a step, H query heads, J vectors of a head, K key/value heads, D head size, A all
numbers of a token's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionItem, LayerTraits
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings, KVDType

CPU = torch.device("cpu")
MakeBackend = Callable[[KVPool], AttentionBackend]


class ChunkedSequences:
    """Queries, keys and values of sequences of these lengths, for a model of one layer."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        layout: KVLayout,
        traits: LayerTraits,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        kv_dtype: KVDType = "auto",
    ) -> None:
        self.lengths, self.layout, self.traits = lengths, layout, traits
        self.dtype, self.device, self.kv_dtype = dtype, device, kv_dtype
        random = torch.Generator().manual_seed(heads + layout.head_dim)

        def draw(length: int, *sizes: int) -> Tensor:
            return torch.randn(length, *sizes, layout.head_dim, generator=random).to(device, dtype)

        self.q_NHD = [2 * draw(length, heads) for length in lengths]
        self.kv_NJKD = [draw(length, layout.num_vectors, layout.num_kv_heads) for length in lengths]

    def alone(self, make: MakeBackend, page_size: int) -> list[Tensor]:
        """The output of each sequence in one pass of its own, over pages that follow one another."""
        outputs = []
        for index, length in enumerate(self.lengths):
            pages = np.arange(-(-length // page_size), dtype=np.int32)
            backend = make(self._pool(page_size, len(pages)))
            outputs.append(self._step(backend, [(index, 0, length)], {index: pages}, page_size))
        return outputs

    def in_chunks(
        self, make: MakeBackend, page_size: int, most: int, random: np.random.Generator, last: int
    ) -> list[Tensor]:
        """The outputs of all of them, in steps of random chunks of at most `most` tokens, over scattered pages. All but
        the `last` tokens of a sequence come in one chunk."""
        each = -(-max(self.lengths) // page_size)
        count = len(self.lengths)
        pages = dict(enumerate(random.permutation(each * count).astype(np.int32).reshape(count, each)))
        backend = make(self._pool(page_size, each * count))
        outputs: list[list[Tensor]] = [[] for _ in self.lengths]
        done = [0] * count
        while items := list(self._items(done, most, last, random)):
            counts = [count for _, _, count in items]
            parts = self._step(backend, items, pages, page_size).split(counts)
            for (index, _, count), part_NA in zip(items, parts, strict=True):
                outputs[index].append(part_NA)
                done[index] += count
        return [torch.cat(each) for each in outputs]

    def _items(
        self, done: list[int], most: int, last: int, random: np.random.Generator
    ) -> Iterator[tuple[int, int, int]]:
        """The index, first token and number of tokens of each sequence that goes on in this step."""
        for index, (at, length) in enumerate(zip(done, self.lengths, strict=True)):
            if at < length:
                yield index, at, min(max(int(random.integers(1, most + 1)), length - last - at), length - at)

    def _step(
        self,
        backend: AttentionBackend,
        items: Sequence[tuple[int, int, int]],
        pages: dict[int, np.ndarray],
        page_size: int,
    ) -> Tensor:
        slots = [
            int(pages[index][token // page_size]) * page_size + token % page_size
            for index, at, count in items
            for token in range(at, at + count)
        ]
        step = backend.begin(
            [AttentionItem(count, at + count, pages[index].copy(), False) for index, at, count in items],
            torch.tensor([slots], device=self.device),
        )
        q_NHD, kv_NJKD = (
            torch.cat([of_all[index][at : at + count] for index, at, count in items])
            for of_all in (self.q_NHD, self.kv_NJKD)
        )
        return step(0, q_NHD, kv_NJKD, self.traits)

    def _pool(self, page_size: int, num_pages: int) -> KVPool:
        settings = CacheSettings(page_size, num_pages, kv_dtype=self.kv_dtype)
        pool = make_kv_pool(self.layout, settings, self.dtype, self.device)
        if self.kv_dtype == "auto":
            pool.full.kv_LJKSD.fill_(torch.nan)
        return pool
