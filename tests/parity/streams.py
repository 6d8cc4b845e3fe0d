"""Sequences driven through the runner by hand, with hand-made page tables, beside the same model in transformers.

Window pages are given up as early as the books may give them up, and are filled with NaN. So a later read of them
shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.attention.choose import choose_attention
from engine.batch import BatchItem, ItemOutput, SampleSpec, ScheduledBatch
from engine.models.loader import LoadedModel
from engine.runner.kv_pool import KVPool, make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings
from tests.parity.place import load_here

VOCAB = 160
CONTEXT = 512
NEW_TOKENS = 16
LONGEST = 160
"""Number of tokens that a page table has room for."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Peer:
    """A random model in transformers, and the folder where it is saved."""

    model: Any
    directory: Path
    chosen: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """First choices, by the tokens of a stream."""

    def first_choices(self, stream: Stream) -> list[int]:
        """The first choice at each place of the output, after all tokens before it. By induction, an output that
        equals them is what greedy generation gives."""
        key = tuple(stream.tokens)
        if key not in self.chosen:
            self.chosen[key] = self.logits(stream.tokens)[stream.prompt_len - 1 : -1].argmax(-1).tolist()
        return self.chosen[key]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]

    def load(self) -> LoadedModel:
        return load_here(self.directory)


def poisoned_pool(loaded: LoadedModel, page_size: int, num_pages: int) -> KVPool:
    settings = CacheSettings(page_size, num_pages, window_ratio=1.0)
    pool = make_kv_pool(loaded.layout, settings, loaded.dtype, loaded.device)
    for paged in (pool.full, pool.window):
        if paged is not None:
            paged.kv_LJKSD.fill_(torch.nan)
    return pool


def plain_runner(loaded: LoadedModel, pool: KVPool) -> TorchRunner:
    """A runner with the attention that a replica would choose here."""
    attention = choose_attention("auto", pool, loaded.device).items
    return TorchRunner(loaded.model, pool, attention, loaded.vocab_size, loaded.max_context_len)


def page_tables(count: int, page_size: int, scattered: bool, seed: int = 3) -> list[NDArray[np.int32]]:
    """Page tables for `count` sequences, from a pool twice as large as they need."""
    each = -(-LONGEST // page_size)
    pages = np.arange(2 * count * each, dtype=np.int32)
    if scattered:
        pages = np.random.default_rng(seed).permutation(pages)
    return [pages[2 * index * each : (2 * index + 1) * each].copy() for index in range(count)]


@dataclass
class Stream:
    """One sequence and its page tables."""

    name: str
    tokens: list[int]
    pages: NDArray[np.int32]
    contiguous: bool
    prompt_len: int
    window_pages: NDArray[np.int32] | None = None
    computed: int = 0

    def item(self, chunk: int) -> BatchItem:
        share = self.tokens[self.computed : self.computed + chunk]
        end = self.computed + len(share)
        spec = SampleSpec(GREEDY) if end == len(self.tokens) else None
        item = BatchItem(self.name, share, self.computed, self.pages, self.contiguous, spec)
        item.window_pages = self.window_pages
        return item

    def take(self, item: BatchItem, output: ItemOutput) -> None:
        self.computed += len(item.token_ids)
        self.tokens += output.token_ids

    def forget(self, pool: KVPool) -> None:
        """Gives up the window pages that no later query can reach."""
        if pool.window is None or self.window_pages is None or pool.layout.window is None:
            return
        gone = max(0, self.computed - pool.layout.window + 1) // pool.page_size
        slots = pool.window.kv_LJKSD.unflatten(3, (-1, pool.page_size))
        slots[:, :, :, [page for page in self.window_pages[:gone].tolist() if page >= 0]] = torch.nan
        self.window_pages[:gone] = -1

    @property
    def produced(self) -> list[int]:
        return self.tokens[self.prompt_len :]


def serve(
    loaded: LoadedModel,
    texts: list[list[int]],
    page_size: int,
    scattered: bool,
    chunk: int,
    new_tokens: int = NEW_TOKENS,
) -> list[Stream]:
    """Serves all texts together. Prompts come in chunks, and each text gets at least `new_tokens` greedy tokens.

    Prompts have different lengths and end their prefill at different steps, so prefills and decodes mix.
    """
    tables = page_tables(len(texts), page_size, scattered)
    windows = page_tables(len(texts), page_size, scattered, seed=4)
    num_pages = 2 * len(texts) * -(-LONGEST // page_size)
    pool = poisoned_pool(loaded, page_size, num_pages)
    runner = plain_runner(loaded, pool)
    streams = [
        Stream(str(index), list(text), table, not scattered, len(text), window if pool.window else None)
        for index, (text, table, window) in enumerate(zip(texts, tables, windows, strict=True))
    ]
    while active := [stream for stream in streams if len(stream.produced) < new_tokens]:
        items = [stream.item(chunk) for stream in active]
        outputs = runner.execute(ScheduledBatch(items)).items
        for stream, item, output in zip(active, items, outputs, strict=True):
            stream.take(item, output)
            stream.forget(pool)
    return streams


def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(0, VOCAB, length).tolist() for length in (1, 5, 33, 100)]
