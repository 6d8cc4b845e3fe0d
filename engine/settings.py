"""Settings of one engine. Validated at the edge (serving/settings/config.py), frozen here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoadFormat = Literal["auto", "dummy"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["auto", "triton", "flash", "torch", "cpu"]
LinearName = Literal["auto", "torch"]
KVDType = Literal["auto", "fp8"]
BooksCheck = Literal["off", "balance", "strict"]
SpeculationMethod = Literal["off", "ngram", "draft"]


CPU_POOL_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its weights are held.

    `path` is a local Hugging Face directory or a hub id, `revision` a commit, tag or branch there. `dtype` auto is
    float32 on a CPU and the checkpoint's own on a GPU. `load_format` dummy gives seeded random weights of the
    directory's config.json.
    """

    path: str
    load_format: LoadFormat = "auto"
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    seed: int = 0
    num_threads: int | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV pool: `page_size` tokens a page; sized by `num_pages`, else by `size_bytes`. With neither a GPU gives
    `memory_share` of its memory to weights, activations and KV, and a CPU has CPU_POOL_BYTES for KV.

    `kv_dtype` auto is that of activations; fp8 halves the bytes of bfloat16, with a scale for each token's head.
    Layers with a sliding window have a pool of their own with `window_ratio` times as many pages. Idle sessions' KV
    may take `host_size_bytes` of host memory when the pool is full, and when that gets full `disk_size_bytes` of files
    under the folder `disk_path`, encrypted if `disk_encrypted`. `books` is checked after each step: nothing, the
    balance of the running counters, or every page (for tests).
    """

    page_size: int = 16
    num_pages: int | None = None
    size_bytes: int | None = None
    memory_share: float = 0.9
    kv_dtype: KVDType = "auto"
    prefix_cache: bool = True
    window_ratio: float = 0.5
    host_size_bytes: int = 0
    disk_size_bytes: int = 0
    disk_path: str | None = None
    disk_encrypted: bool = False
    books: BooksCheck = "balance"


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Who proposes tokens for the model to verify, and at most how many a step.

    `ngram_size` tokens that occurred before make the n-gram proposer speak; `draft_model` is needed for "draft".
    `row_cost` is what one more token in a step costs, `draft_cost` what a pass of the draft model costs, as shares of
    a one-token step; drafts that would not pay for it are not made. The defaults are of the embedded models on a CPU,
    where eight rows, seven drafts and the token before them, are the most that a step takes in its quick way.
    """

    method: SpeculationMethod = "off"
    max_draft_tokens: int = 7
    ngram_size: int = 2
    draft_model: ModelSettings | None = None
    row_cost: float = 0.12
    draft_cost: float = 0.45


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


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """How steps run.

    `attention` auto is the first that this machine can run of triton and flash on a GPU; on a CPU the
    compiled kernels (cpu), and torch where there are none. `graphs`: on a
    GPU, steps of up to `max_graph_tokens` tokens are replayed as CUDA graphs. `overlap`: on a GPU, the next step is
    planned and launched while this one runs. `decode_steps` is how many steps are run in one go when nothing waits.
    `tensor_parallel` processes hold one model between them. `linear`: who multiplies by the weights; auto is on a GPU
    what is timed to be the quickest there, on a CPU what was found to be.
    """

    attention: AttentionName = "auto"
    graphs: bool = True
    max_graph_tokens: int = 256
    overlap: bool = True
    decode_steps: int = 1
    tensor_parallel: int = 1
    linear: LinearName = "auto"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything the composition root (engine/build.py) needs."""

    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    execution: ExecutionSettings = ExecutionSettings()
