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


class PoolTooSmall(ValueError):
    """The settings leave a KV pool too few pages."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """An adapter of the model (engine/models/adapters.py): what requests call it, and its directory or hub id."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its weights are held.

    `path` is a local Hugging Face directory or a hub id; `revision` is a commit, tag or branch on the hub. `dtype` auto
    is float32 on a CPU and the checkpoint's own on a GPU. `load_format` dummy makes seeded random weights for the
    directory's config.json. `keep_fp8`: matrices that the checkpoint has in fp8 stay so in a GPU's memory; in
    a CPU's they do anyway.
    """

    path: str
    load_format: LoadFormat = "auto"
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    seed: int = 0
    num_threads: int | None = None
    revision: str | None = None
    keep_fp8: bool = False
    adapters: tuple[AdapterSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV pool, in pages of `page_size` tokens. `num_pages` gives its size, else `size_bytes`. With neither, a GPU
    gives `memory_share` of its memory to weights, activations and KV, and a CPU has CPU_POOL_BYTES for KV.

    `kv_dtype` auto is that of activations; fp8 takes half the bytes of bfloat16, plus a scale for each head of a token.
    Layers with a sliding window have a pool of their own with `window_ratio` times as many pages. When the pool is
    full, idle sessions' KV may take `host_size_bytes` of host memory. When that is full, it may take `disk_size_bytes`
    of files under the folder `disk_path`, encrypted if `disk_encrypted`. `books` says what is checked after each step:
    nothing, the balance of the running counters, or every page (for tests).
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
    """Who proposes tokens for the model to verify, and how many at most in a step.

    The n-gram proposer proposes when the last `ngram_size` tokens occurred before. "draft" needs `draft_model`.
    `row_cost` is what one more token in a step costs, `draft_cost` what a pass of the draft model costs, both as shares
    of a one-token step; drafts that would not pay off are not made. None: measured when the engine starts.
    """

    method: SpeculationMethod = "off"
    max_draft_tokens: int = 7
    ngram_size: int = 2
    draft_model: ModelSettings | None = None
    row_cost: float | None = None
    draft_cost: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of a step and of the queue, in tokens and requests.

    `max_batch_tokens` bounds one step, `chunk_size` one request's share of it. When `max_waiting` requests wait,
    further ones get EngineOverloaded.
    """

    max_batch_tokens: int = 2048
    chunk_size: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    max_context_len: int | None = None


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """How steps run.

    `attention` auto is, on a GPU, the first of triton and flash that this machine can run; on a CPU, the compiled
    kernels (cpu), or torch where there are none. `graphs`: on a GPU, steps of up to `max_graph_tokens` tokens are
    replayed as CUDA graphs. `overlap`: on a GPU, the next step is planned and launched while this one runs.
    `decode_steps` is how many steps run in one launch when no request waits. `tensor_parallel` processes hold one model
    between them. `linear` says what multiplies by the weights; auto is, on a GPU, what is timed as the quickest at
    start, and on a CPU the compiled kernels, or what was found to be the quickest in torch. `deterministic`: logits
    depend on the tokens before them alone, to the last bit, whatever else runs and however a sequence is cut into
    steps; only native models over the compiled CPU kernels or Triton's have this, others are refused.
    """

    attention: AttentionName = "auto"
    graphs: bool = True
    max_graph_tokens: int = 256
    overlap: bool = True
    decode_steps: int = 1
    tensor_parallel: int = 1
    linear: LinearName = "auto"
    deterministic: bool = False


DEFAULT_EXECUTION = ExecutionSettings()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything the composition root (engine/build.py) needs."""

    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    execution: ExecutionSettings = ExecutionSettings()
