"""Settings of one engine. Validated at the edge (serving/config.py), frozen here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "dummy"]
DTypeName = Literal["auto", "float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its weights are held.

    `path` is a local Hugging Face directory or a hub id. `dtype` auto is float32 on a CPU and the checkpoint's own on
    a GPU. `load_format` dummy gives seeded random weights of the directory's config.json.
    """

    path: str
    load_format: LoadFormat = "auto"
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    seed: int = 0
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV pool: `page_size` tokens a page; sized by `num_pages`, or by `size_bytes` when that is None."""

    page_size: int = 16
    num_pages: int | None = None
    size_bytes: int = 256 * 1024 * 1024
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of a step and of the queue, in tokens and requests.

    `max_batch_tokens` bounds one step, `chunk_size` one request's share of it; `max_waiting` is where
    EngineOverloaded begins.
    """

    max_batch_tokens: int = 2048
    chunk_size: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    max_context_len: int | None = None
    strict_books: bool = False


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything the composition root (engine/build.py) needs."""

    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
