"""The runner's half of the composition root, for each rank: the model or its share, pools that fit into memory,
attention over them, and what launches steps.

On a GPU the pool takes the memory that is left after the largest step has been tried.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cache.token_chain import KVIdentity
from engine.attention.choose import AttentionChoice, choose_attention
from engine.attention.interface import Queries
from engine.device import dtype_name, is_gpu, memory_room, peak_bytes, reset_peak, resolve_device
from engine.kernels.choose import choose_ops, triton_trouble
from engine.memory import MemoryShort, check_host, memory_for
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.parallel.ranks import OneRank, RankGroup
from engine.parallel.shared_logits import SharedLogits
from engine.runner.device_runner import DeviceRunner
from engine.runner.disk_folder import DiskFolder, DiskUnavailable
from engine.runner.disk_format import Checked
from engine.runner.disk_store import DiskStore
from engine.runner.draft_model import DraftModel
from engine.runner.graphs import Graphs, ladder, make_graphs
from engine.runner.host_blocks import HostBlocks
from engine.runner.host_copies import HostCopies
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.runner.protocol import Runner
from engine.runner.sample_table import RowPicker, pick_by_row
from engine.runner.step_buffers import StepBuffers
from engine.runner.torch_runner import TorchRunner
from engine.settings import (
    CPU_POOL_BYTES,
    DEFAULT_EXECUTION,
    CacheSettings,
    DeviceName,
    EngineSettings,
    ExecutionSettings,
    LinearName,
    SchedulerSettings,
    SpeculationSettings,
)

PROFILE_PAGES = 2
STEP_SETTINGS = "scheduler.max_batch_tokens, scheduler.max_running, execution.max_graph_tokens"
DEFAULT_SCHEDULER = SchedulerSettings()
ONE_RANK = OneRank()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that a step can have: rows, items, sampled rows, and steps in one launch."""

    rows: int
    items: int
    sampled: int
    steps: int

    @classmethod
    def of(cls, scheduler: SchedulerSettings, execution: ExecutionSettings, num_drafts: int) -> StepLimits:
        items = min(scheduler.max_running, scheduler.max_batch_tokens)
        sampled = min(items * (1 + num_drafts), scheduler.max_batch_tokens)
        return cls(scheduler.max_batch_tokens, items, sampled, execution.decode_steps)


def make_runner(settings: EngineSettings, ranks: RankGroup) -> Runner:
    """The runner of `make_rank`."""
    return make_rank(settings, ranks)[0]


def make_rank(settings: EngineSettings, ranks: RankGroup) -> tuple[Runner, LoadedModel]:
    """A runner and the model in it. All ranks call this at the same time. Raises what build_engine raises."""
    speculation = settings.speculation
    linear = settings.execution.linear
    device = resolve_device(settings.model.device)
    with memory_for(device, "the model", "model.path, model.dtype, execution.tensor_parallel"):
        loaded = load_model(
            settings.model,
            ops=choose_ops(device),
            ranks=ranks,
            linear=linear,
            deterministic=settings.execution.deterministic,
        )
    runner = build_runner(
        loaded,
        settings.cache,
        _load_draft(loaded, speculation, ranks, linear),
        scheduler=settings.scheduler,
        execution=settings.execution,
        num_drafts=speculation.max_draft_tokens if speculation.method != "off" else 0,
        ranks=ranks,
    )
    return runner, loaded


def _load_draft(
    target: LoadedModel, speculation: SpeculationSettings, ranks: RankGroup, linear: LinearName
) -> LoadedModel | None:
    """Each rank holds the whole draft model, on the device of its share, and takes its proposals from rank 0."""
    if speculation.method != "draft":
        return None
    if speculation.draft_model is None:
        raise UnsupportedModel("speculation with a draft model needs draft_model")
    name: DeviceName = "cuda" if is_gpu(target.device) else "cpu"
    settings = replace(speculation.draft_model, device=name)
    if speculation.draft_model.device not in ("auto", name):
        raise UnsupportedModel(
            f"speculation.draft_model.device is {speculation.draft_model.device!r}, the model is on {name!r}"
        )
    with memory_for(target.device, "the draft model", "speculation.draft_model"):
        try:
            draft = load_model(settings, ops=choose_ops(target.device), linear=linear)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"speculation.draft_model: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of {target.vocab_size}"
        )
    return draft if ranks.size == 1 else replace(draft, model=SharedLogits(draft.model, ranks))


def build_runner(
    loaded: LoadedModel,
    cache: CacheSettings,
    draft: LoadedModel | None = None,
    *,
    scheduler: SchedulerSettings = DEFAULT_SCHEDULER,
    execution: ExecutionSettings = DEFAULT_EXECUTION,
    num_drafts: int = 0,
    ranks: RankGroup = ONE_RANK,
) -> Runner:
    """The model over its own KV pools. The KV of a draft model, which has the same vocabulary, lies in a separate pool
    with as many pages. `num_drafts` is the most proposals that are verified for an item.

    Raises PoolTooSmall, MemoryShort, AttentionUnavailable, DiskUnavailable or UnsupportedModel (a draft model with
    sliding windows, or adapters where the attention has none).
    """
    check_host(cache.host_size_bytes, "idle sessions' KV", "cache.host_mib")
    if not loaded.native:
        execution = replace(execution, graphs=False)
    limits = StepLimits.of(scheduler, execution, num_drafts)
    on_gpu = is_gpu(loaded.device)
    with memory_for(loaded.device, "the largest step", STEP_SETTINGS):
        room_bytes = _room_bytes(loaded, cache, draft, execution, limits, ranks) if on_gpu else CPU_POOL_BYTES
    draft_bytes = 0
    if draft is not None:
        draft_bytes = draft.layout.page_bytes(draft.layout.num_layers, cache.page_size, draft.dtype)
    pool = make_kv_pool(loaded.layout, cache, loaded.dtype, loaded.device, draft_bytes, room_bytes)
    with memory_for(loaded.device, "attention beside the KV pool", "cache, execution.attention"):
        attention = attention_of(loaded, pool, execution)
    if loaded.adapters and attention.name != "cpu":
        raise UnsupportedModel(f"model.adapters need execution.attention cpu, not {attention.name}")
    blocks = _pinned_blocks(cache.host_size_bytes // ranks.size, loaded.device) if on_gpu else None
    careful = careful_runner(loaded, pool, attention, draft, execution, open_disk(cache), blocks)
    if not on_gpu:
        return careful
    graphs = make_graphs(loaded.device, wanted=execution.graphs)
    with memory_for(loaded.device, "the largest step beside the KV pool", f"{STEP_SETTINGS}, cache"):
        runner = device_runner(loaded, careful, pool, attention, limits, graphs, execution, ranks)
        runner.capture()
        for rows, items, longest in steps_beyond_graphs(limits, execution):
            runner.rehearse(rows, items, longest)
        runner.rehearse(limits.rows, limits.items)  # proves that there is memory for the largest step
        runner.rehearse_picks()
        for rows, _, longest in steps_beyond_graphs(limits, replace(execution, graphs=False)):
            careful.rehearse_drafts(rows, longest)
    return runner


def steps_beyond_graphs(limits: StepLimits, execution: ExecutionSettings) -> list[tuple[int, int, int]]:
    """Steps to run before the replica starts, as rows, items and rows of the longest item. Together they use every
    kernel that steps outside graphs need. Attention kernels depend on the longest item, on whether there are many rows
    or few, and on whether all items have as many. A kernel compiled in service would stop everything for seconds."""
    first = execution.max_graph_tokens + 1 if execution.graphs else 1
    steps = []
    for longest in (*(2**power for power in range(limits.rows.bit_length())), limits.rows):
        for rows in (max(first, longest), max(first, longest + 1), min(limits.rows, longest * limits.items)):
            items = -(-rows // longest)
            if first <= rows <= limits.rows and items <= limits.items:
                steps.append((rows, items, longest))
    return list(dict.fromkeys(steps))


def attention_of(loaded: LoadedModel, pool: KVPool, execution: ExecutionSettings) -> AttentionChoice:
    """The backend for the model's layers over a pool that nothing has been written to yet."""
    queries = Queries(loaded.group, loaded.dtype)
    return choose_attention(
        execution.attention,
        pool,
        loaded.device,
        sinks=loaded.sinks,
        deterministic=None if loaded.deterministic is None else queries,
    )


def careful_runner(
    loaded: LoadedModel,
    pool: KVPool,
    attention: AttentionChoice,
    draft: LoadedModel | None,
    execution: ExecutionSettings,
    disk: DiskStore | None = None,
    blocks: HostBlocks | None = None,
) -> TorchRunner:
    """The runner that supports everything, one step at a time."""
    drafter, draft_pool = None, None
    if draft is not None:
        draft_pool = _draft_pool(draft, pool)
        drafter = DraftModel(
            draft.model,
            draft_pool,
            attention_of(draft, draft_pool, execution).items,
            draft.max_context_len,
        )
    copies = HostCopies(pool, None if draft_pool is None else draft_pool.full, disk, blocks)
    about: dict[str, str | int | float | bool] = {
        "attention": attention.name,
        "attention_reason": attention.reason,
        "deterministic": loaded.deterministic is not None,
        **loaded.about,
    }
    if disk is not None:
        about["disk"] = disk.path
    if loaded.adapters:
        about["adapters"] = ", ".join(loaded.adapters)
    return TorchRunner(
        loaded.model, pool, attention.items, loaded.vocab_size, loaded.max_context_len, drafter, copies,
        about=about, identity=kv_identity(loaded, pool, draft), adapters=loaded.adapters,
    )  # fmt: skip


def _kept_layout(layout: KVLayout) -> dict[str, object]:
    """Models without latents have the identity that they had before there were any."""
    return {key: value for key, value in asdict(layout).items() if value is not None}


def kv_identity(loaded: LoadedModel, pool: KVPool, draft: LoadedModel | None) -> KVIdentity:
    """The identity of one rank's KV: everything that its bytes depend on except tokens, tenant and page size. Where KV
    of the same tokens may differ, the identity must differ. Replicas with the same configuration on like devices have
    the same identity."""
    kept: dict[str, object] = {
        "native": loaded.native,
        "weights": dtype_name(loaded.weights_dtype),
        "activations": dtype_name(loaded.dtype),
        "kv": dtype_name(pool.full.kv_LJKSD.dtype),
        "layout": _kept_layout(loaded.layout),
        "deterministic": loaded.deterministic,
        "draft": None
        if draft is None
        else [draft.fingerprint, dtype_name(draft.dtype), _kept_layout(draft.layout)],
    }
    if loaded.keeps_quantized or (draft is not None and draft.keeps_quantized):
        kept["quantized_matrices"] = [loaded.keeps_quantized, draft is not None and draft.keeps_quantized]
    return KVIdentity(weights=loaded.fingerprint, kv_format=json.dumps(kept, sort_keys=True))


def device_runner(
    loaded: LoadedModel,
    careful: TorchRunner,
    pool: KVPool,
    attention: AttentionChoice,
    limits: StepLimits,
    graphs: Graphs,
    execution: ExecutionSettings,
    ranks: RankGroup,
) -> DeviceRunner:
    """A DeviceRunner around `careful`, with the same model and pool. No graph is captured yet."""
    sizes = ladder(min(execution.max_graph_tokens, limits.rows)) if execution.graphs else ()
    buffers = StepBuffers(
        max_rows=max(limits.rows, *sizes, 1),
        max_items=max(limits.items, *sizes, 1),
        max_sampled=max(limits.sampled, *sizes, 1),
        max_pages=-(-(loaded.max_context_len + limits.steps) // pool.page_size),
        num_pools=1 if pool.window is None else 2,
        max_steps=limits.steps,
        page_size=pool.page_size,
        device=loaded.device,
    )
    picker = choose_picker(loaded.device)
    return DeviceRunner(
        careful, loaded.model, attention.tables, buffers, picker, graphs, sizes, limits.sampled, limits.steps,
        ranks, runs_ahead=execution.overlap,
    )  # fmt: skip


def open_disk(cache: CacheSettings) -> DiskStore | None:
    """A store in a folder of this rank's own; None if no KV is to go to disk. Raises DiskUnavailable."""
    if not cache.disk_size_bytes:
        return None
    if cache.disk_path is None:
        raise DiskUnavailable("disk_size_bytes needs a disk_path")
    folder = DiskFolder(Path(cache.disk_path))
    if not cache.disk_encrypted:
        return DiskStore(folder, Checked())
    from engine.runner.disk_encryption import Encrypted  # its package is needed for this alone

    return DiskStore(folder, Encrypted())


def _pinned_blocks(size_bytes: int, device: torch.device) -> HostBlocks:
    """One rank's host memory for idle sessions' KV. Raises MemoryShort if the driver does not pin as much."""
    try:
        return HostBlocks(size_bytes, device)
    except RuntimeError as error:
        raise MemoryShort(f"idle sessions' KV has no pinned host memory (cache.host_mib): {error}") from error


def choose_picker(device: torch.device) -> RowPicker:
    """Triton's picker on a GPU where Triton works, otherwise torch's."""
    if device.type != "cuda" or triton_trouble(device) is not None:
        return pick_by_row
    from engine.kernels.sampling import pick_tokens

    return pick_tokens


def _room_bytes(
    loaded: LoadedModel,
    cache: CacheSettings,
    draft: LoadedModel | None,
    execution: ExecutionSettings,
    limits: StepLimits,
    ranks: RankGroup,
) -> int:
    """Bytes that a GPU has for KV: its share of memory, less what attention holds, the draft model's too, less the
    largest step's peak, and less what graphs keep for their steps. A draft model's steps are not tried. 0 if the
    settings give the size of the pool."""
    if cache.num_pages is not None or cache.size_bytes is not None:
        return 0
    trial = replace(cache, num_pages=PROFILE_PAGES, window_ratio=1.0)
    pool = make_kv_pool(loaded.layout, trial, loaded.dtype, loaded.device)
    attention = attention_of(loaded, pool, execution)
    careful = careful_runner(loaded, pool, attention, draft, execution)
    graphs = make_graphs(loaded.device, wanted=False)
    runner = device_runner(loaded, careful, pool, attention, limits, graphs, execution, ranks)
    steps = [(limits.rows, limits.items)]
    if execution.graphs:
        largest = min(execution.max_graph_tokens, limits.rows)
        steps.append((largest, largest))
    reserve = 0
    for rows, items in steps:
        reset_peak(loaded.device)
        runner.rehearse(rows, items)
        reserve += peak_bytes(loaded.device)
    room = memory_room(loaded.device, cache.memory_share, reserve)
    runner.close()
    return ranks.least(room)  # the least of all ranks: one set of books counts their pages


def _draft_pool(draft: LoadedModel, target: KVPool) -> KVPool:
    """A pool with as many pages as the target's, since a sequence's page table serves both."""
    settings = CacheSettings(page_size=target.page_size, num_pages=target.num_pages)
    return make_kv_pool(draft.layout, settings, draft.dtype, draft.device)
