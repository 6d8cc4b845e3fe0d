"""Settings of one replica's engine, the sections of application args that become `engine.settings.EngineSettings`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from engine.settings import (
    AdapterSettings,
    AttentionName,
    BooksCheck,
    CacheSettings,
    DeviceName,
    DTypeName,
    KVDType,
    LinearName,
    LoadFormat,
    ModelSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from serving.settings.settings_paths import resolve_path, state_path
from serving.settings.strict_settings import Name, NotEmpty, NotNegative, PositiveInt, StrictModel
from serving.text.reasoning.formats import ReasoningSetting
from serving.text.tool_calls.formats import ToolCallsSetting

HOST_MIB = 512
SPECULATION = SpeculationSettings()

ADAPTER_CONFIG = "adapter_config.json"
_MIB = 1024 * 1024
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _yaml_off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


def _model_id(name: str | None, path: str) -> str:
    return name or Path(path).name


class ModelArgs(StrictModel):
    """Which model. `path`: a local Hugging Face directory (relative to the project) or a hub id, `revision`: a commit,
    tag or branch there. `tool_calls` is the format of its function calls, `reasoning` that of its thoughts; `auto` is
    what its chat template has.
    `generation_config`: whether the file of this name beside the weights gives the defaults of sampling. `aliases` are
    names that requests may give the model beside its own. `adapters` are LoRA adapters, directories or hub ids by the
    names that requests give as their model. `keep_fp8`: see engine.settings.ModelSettings."""

    path: NotEmpty
    name: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    seed: int = 0
    num_threads: PositiveInt | None = None
    tool_calls: Annotated[ToolCallsSetting, BeforeValidator(_yaml_off)] = "auto"
    reasoning: Annotated[ReasoningSetting, BeforeValidator(_yaml_off)] = "auto"
    revision: NotEmpty | None = None
    generation_config: Annotated[Literal["auto", "off"], BeforeValidator(_yaml_off)] = "auto"
    aliases: list[NotEmpty] = Field(default_factory=list)
    adapters: dict[Name, NotEmpty] = Field(default_factory=dict)
    keep_fp8: bool = False

    @field_validator("path")
    @classmethod
    def _is_a_model(cls, path: str) -> str:
        """A directory that is not there is not asked for at the hub, unless it may be an id there."""
        directory = Path(resolve_path(path))
        if directory.exists():
            if not (directory / "config.json").is_file():
                raise ValueError(f"{str(directory)!r} is no model's directory: it has no config.json")
        elif not _HUB_ID.fullmatch(path):
            raise ValueError(f"there is no directory {path!r}")
        return path

    @field_validator("revision")
    @classmethod
    def _of_a_hub_id(cls, revision: str | None, info: ValidationInfo) -> str | None:
        path = info.data.get("path")
        if revision is not None and path is not None and Path(resolve_path(path)).is_dir():
            raise ValueError(f"{path!r} is a directory; only a model of the hub has revisions")
        return revision

    @field_validator("aliases")
    @classmethod
    def _each_once(cls, aliases: list[str], info: ValidationInfo) -> list[str]:
        if twice := {alias for alias in aliases if aliases.count(alias) > 1}:
            raise ValueError(f"{min(twice)!r} is there twice")
        if (own := _model_id(info.data.get("name"), info.data.get("path", ""))) in aliases:
            raise ValueError(f"{own!r} is the model's own name")
        return aliases

    @field_validator("adapters")
    @classmethod
    def _are_adapters(cls, adapters: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        own = _model_id(info.data.get("name"), info.data.get("path", ""))
        taken = {own, *info.data.get("aliases", ())}
        for name, path in adapters.items():
            if name in taken:
                raise ValueError(f"{name!r} is a name of the model itself")
            directory = Path(resolve_path(path))
            if directory.exists():
                if not (directory / ADAPTER_CONFIG).is_file():
                    raise ValueError(
                        f"{name!r}: {str(directory)!r} is no adapter's directory: it has no {ADAPTER_CONFIG}"
                    )
            elif not _HUB_ID.fullmatch(path):
                raise ValueError(f"{name!r}: there is no directory {path!r}")
        return adapters

    @property
    def model_id(self) -> str:
        return _model_id(self.name, self.path)

    def settings(self) -> ModelSettings:
        return ModelSettings(
            path=resolve_path(self.path),
            load_format=self.load_format,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            num_threads=self.num_threads,
            revision=self.revision,
            keep_fp8=self.keep_fp8,
            adapters=tuple(AdapterSettings(name, resolve_path(path)) for name, path in self.adapters.items()),
        )


class CacheArgs(StrictModel):
    """The KV pool of each replica, in pages of `page_size` tokens or, without `num_pages`, in MiB.

    With neither a GPU gives `memory_share` of its memory to weights, activations and KV together, a CPU 256 MiB to KV.
    Layers with a sliding window have a pool of their own, of `window_ratio` times as many pages. `host_mib` of host
    memory, or the `host_share` of it, take idle sessions' KV that the pool has no room for; HOST_MIB if neither is
    given. `disk_mib` of files under `disk_path` take what host memory has no room for, encrypted if `disk_encrypted`.
    `books` says how the books are checked each step.
    """

    page_size: Annotated[int, Field(ge=1, le=256)] = 16
    num_pages: PositiveInt | None = None
    size_mib: PositiveInt | None = None
    memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.9
    kv_dtype: KVDType = "auto"
    prefix_cache: bool = True
    window_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    host_mib: NotNegative | None = None
    host_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    disk_mib: NotNegative = 0
    disk_path: Annotated[str | None, Field(min_length=1, validate_default=True)] = None
    disk_encrypted: bool = False
    books: Annotated[BooksCheck, BeforeValidator(_yaml_off)] = "balance"

    @field_validator("size_mib")
    @classmethod
    def _in_place_of_pages(cls, size_mib: int | None, info: ValidationInfo) -> int | None:
        if size_mib is not None and info.data.get("num_pages") is not None:
            raise ValueError("give a size_mib or num_pages, not both")
        return size_mib

    @field_validator("host_share")
    @classmethod
    def _in_place_of_a_size(cls, host_share: float | None, info: ValidationInfo) -> float | None:
        if host_share is not None and info.data.get("host_mib") is not None:
            raise ValueError("give a host_share or a host_mib, not both")
        return host_share

    @field_validator("disk_mib")
    @classmethod
    def _by_way_of_the_host(cls, disk_mib: int, info: ValidationInfo) -> int:
        if disk_mib and info.data.get("host_mib") == 0:
            raise ValueError("KV gets to disk by way of host memory: disk_mib needs a host_mib above 0")
        return disk_mib

    @field_validator("disk_path")
    @classmethod
    def _needed_by_the_disk(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is None and info.data.get("disk_mib"):
            raise ValueError("disk_mib needs a disk_path, the folder that KV is kept in")
        if path is not None and info.data.get("disk_mib") == 0:
            raise ValueError("is the folder of disk_mib, and disk_mib is 0: give both or neither")
        return path

    @field_validator("disk_encrypted")
    @classmethod
    def _of_a_disk(cls, disk_encrypted: bool, info: ValidationInfo) -> bool:
        if disk_encrypted and info.data.get("disk_mib") == 0:
            raise ValueError("is for KV on disk, and disk_mib is 0")
        return disk_encrypted

    def settings(self) -> CacheSettings:
        return CacheSettings(
            page_size=self.page_size,
            num_pages=self.num_pages,
            size_bytes=None if self.size_mib is None else self.size_mib * _MIB,
            memory_share=self.memory_share,
            kv_dtype=self.kv_dtype,
            prefix_cache=self.prefix_cache,
            window_ratio=self.window_ratio,
            host_size_bytes=self._host_size_bytes(),
            disk_size_bytes=self.disk_mib * _MIB,
            disk_path=None if self.disk_path is None else str(state_path(self.disk_path, "cache.disk_path")),
            disk_encrypted=self.disk_encrypted,
            books=self.books,
        )

    def _host_size_bytes(self) -> int:
        if self.host_share is None:
            return _MIB * (HOST_MIB if self.host_mib is None else self.host_mib)
        from engine.memory import host_memory_bytes  # loads torch, which only replicas need

        return int(host_memory_bytes() * self.host_share)


class SchedulerArgs(StrictModel):
    """Limits of one step and of the queue, in tokens and requests."""

    max_batch_tokens: PositiveInt = 2048
    chunk_size: PositiveInt = 512
    max_running: PositiveInt = 64
    max_waiting: PositiveInt = 1024
    max_context_len: PositiveInt | None = None

    @field_validator("chunk_size")
    @classmethod
    def _within_a_step(cls, chunk_size: int, info: ValidationInfo) -> int:
        """The default is cut to the step; who names a size is to get it."""
        step_tokens = info.data.get("max_batch_tokens")
        if step_tokens is not None and chunk_size > step_tokens:
            raise ValueError(f"{chunk_size} is above max_batch_tokens, {step_tokens}")
        return chunk_size


class SpeculationArgs(StrictModel):
    """Who proposes tokens ahead of the model: nobody, the text so far (`ngram`), or a smaller model (`draft`).

    At most `max_draft_tokens` a step. `ngram_size` tokens that occurred before make the n-gram proposer speak.
    `row_cost` is what one more token in a step costs, `draft_cost` what a pass of the draft model costs, as shares of a
    step of one token. Without them a replica measures them when it starts.
    """

    method: Annotated[SpeculationMethod, BeforeValidator(_yaml_off)] = "off"
    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = SPECULATION.max_draft_tokens
    ngram_size: Annotated[int, Field(ge=1, le=16)] = SPECULATION.ngram_size
    draft_model: Annotated[ModelArgs | None, Field(validate_default=True)] = None
    row_cost: Annotated[float, Field(ge=0, lt=1)] | None = SPECULATION.row_cost
    draft_cost: Annotated[float, Field(ge=0)] | None = SPECULATION.draft_cost

    @field_validator("draft_model")
    @classmethod
    def _needed_by_draft(cls, model: ModelArgs | None, info: ValidationInfo) -> ModelArgs | None:
        if model is None and info.data.get("method") == "draft":
            raise ValueError("method 'draft' needs a draft_model with a path")
        if model is not None and info.data.get("method") in ("off", "ngram"):
            raise ValueError(f"is for method 'draft', not {info.data['method']!r}")
        if model is not None and model.adapters:
            raise ValueError("a draft model has no adapters")
        return model

    def settings(self) -> SpeculationSettings:
        return SpeculationSettings(
            method=self.method,
            max_draft_tokens=self.max_draft_tokens,
            ngram_size=self.ngram_size,
            draft_model=None if self.draft_model is None else self.draft_model.settings(),
            row_cost=self.row_cost,
            draft_cost=self.draft_cost,
        )


class ExecutionArgs(StrictModel):
    """How a replica runs its steps, see engine.settings.ExecutionSettings. `tensor_parallel` GPUs (or, on a CPU,
    processes) hold one model between them."""

    attention: AttentionName = "auto"
    graphs: bool = True
    max_graph_tokens: PositiveInt = 256
    overlap: bool = True
    decode_steps: Annotated[int, Field(ge=1, le=64)] = 1
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    linear: LinearName = "auto"
    deterministic: bool = False

    def conflicts(self, model: ModelArgs | None, cache: CacheArgs | None) -> list[str]:
        """What these settings cannot do with those of other sections, each by the names of its keys."""
        on_cpu = model is not None and model.device == "cpu"
        in_float32 = model is not None and model.dtype == "float32"
        reasons = []
        if cache is not None and cache.kv_dtype == "fp8":
            if self.attention in ("flash", "torch", "cpu"):
                reasons.append(
                    f"attention {self.attention!r} has no fp8: cache.kv_dtype 'fp8' needs 'triton'"
                )
            elif on_cpu and self.attention == "auto":
                reasons.append("cache.kv_dtype 'fp8' needs a GPU, model.device is 'cpu'")
        if self.attention == "cpu" and model is not None and model.device == "cuda":
            reasons.append("attention 'cpu' is for processors, model.device is 'cuda'")
        if self.attention == "flash":
            if on_cpu:
                reasons.append("attention 'flash' needs a GPU, model.device is 'cpu'")
            if in_float32:
                reasons.append("attention 'flash' takes bfloat16 and float16, model.dtype is 'float32'")
            if cache is not None and cache.page_size % 16:
                reasons.append(
                    f"attention 'flash' needs a cache.page_size that is a multiple of 16, not {cache.page_size}"
                )
        if model is not None and model.keep_fp8:
            reasons += self._against_fp8(model)
        if model is not None and model.adapters:
            reasons += self._against_adapters(model)
        if self.deterministic:
            reasons += self._against_determinism(model)
        return reasons

    def _against_fp8(self, model: ModelArgs) -> list[str]:
        reasons = []
        if model.device == "cpu":
            reasons.append("model.keep_fp8 needs a GPU, model.device is 'cpu'")
        if model.dtype == "float32":
            reasons.append("model.keep_fp8 multiplies bfloat16 and float16, model.dtype is 'float32'")
        if self.linear != "auto":
            reasons.append(f"model.keep_fp8 needs linear 'auto', not {self.linear!r}")
        if self.tensor_parallel > 1:
            reasons.append(f"model.keep_fp8 needs tensor_parallel 1, not {self.tensor_parallel}")
        return reasons

    def _against_adapters(self, model: ModelArgs) -> list[str]:
        reasons = []
        if model.device == "cuda":
            reasons.append("model.adapters need a CPU, model.device is 'cuda'")
        if self.attention not in ("auto", "cpu"):
            reasons.append(f"model.adapters need attention 'cpu', not {self.attention!r}")
        if self.linear != "auto":
            reasons.append(f"model.adapters need linear 'auto', not {self.linear!r}")
        if self.tensor_parallel > 1:
            reasons.append(f"model.adapters need tensor_parallel 1, not {self.tensor_parallel}")
        return reasons

    def _against_determinism(self, model: ModelArgs | None) -> list[str]:
        reasons = []
        if self.attention not in ("auto", "cpu", "triton"):
            reasons.append(f"deterministic needs attention 'cpu' or 'triton', not {self.attention!r}")
        if model is not None and model.keep_fp8:
            reasons.append("deterministic has no products for model.keep_fp8")
        if self.linear != "auto":
            reasons.append(f"deterministic needs linear 'auto', not {self.linear!r}")
        if self.tensor_parallel > 1:
            reasons.append(f"deterministic needs tensor_parallel 1, not {self.tensor_parallel}")
        return reasons
