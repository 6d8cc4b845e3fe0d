"""Settings of how a replica's engine runs its steps."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from engine.settings import AttentionName, LinearName, SpeculationMethod, SpeculationSettings
from serving.settings.cache_args import CacheArgs
from serving.settings.model_args import ModelArgs
from serving.settings.strict_settings import PositiveInt, StrictModel, yaml_off

SPECULATION = SpeculationSettings()


class SchedulerArgs(StrictModel):
    """Limits of one step and of the queue."""

    max_batch_tokens: PositiveInt = Field(default=2048, description="Tokens in one step, over all requests.")
    chunk_size: PositiveInt = Field(
        default=512,
        description="""Prompt tokens of one request in one step. A smaller number is smoother for other
        requests, and slower for long prompts. If it is not set, it is at most `max_batch_tokens`.""",
    )
    max_running: PositiveInt = Field(default=64, description="Requests in one batch.")
    max_waiting: PositiveInt = Field(
        default=1024,
        description="Requests that wait for admission. Beyond this a request is refused with 429.",
    )
    max_context_len: PositiveInt | None = Field(
        default=None,
        description="""Tokens of history and output together. Unless set, the model's own limit: what
        its config.json says, or what YaRN stretches it to.""",
    )

    @field_validator("chunk_size")
    @classmethod
    def _within_a_step(cls, chunk_size: int, info: ValidationInfo) -> int:
        """The default is cut to the step; who names a size is to get it."""
        step_tokens = info.data.get("max_batch_tokens")
        if step_tokens is not None and chunk_size > step_tokens:
            raise ValueError(f"{chunk_size} is above max_batch_tokens, {step_tokens}")
        return chunk_size


class SpeculationArgs(StrictModel):
    """What proposes tokens for the model to verify. This changes how fast tokens come, never which."""

    method: Annotated[SpeculationMethod, BeforeValidator(yaml_off)] = Field(
        default="off",
        description="""`off`: nothing; `ngram`: the session's own text, which needs no second model and
        helps where answers repeat what was said before (quotes, code, lists); `draft`: a smaller model.""",
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = Field(
        default=SPECULATION.max_draft_tokens,
        description="Proposed tokens of one request in one step.",
    )
    ngram_size: Annotated[int, Field(ge=1, le=16)] = Field(
        default=SPECULATION.ngram_size,
        description="""For `ngram`: how many of the last tokens must have occurred before, for the next
        ones to be proposed.""",
    )
    draft_model: Annotated[ModelArgs | None, Field(validate_default=True)] = Field(
        default=None,
        description="""For `draft`: the smaller model, with the keys of `model`. It must have the same
        vocabulary, and runs on the model's device.""",
    )
    row_cost: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=SPECULATION.row_cost,
        description="""The cost of one more token in a step, as a share of a step of one token. Drafts
        that would not pay for themselves are not made. Unless set, a replica measures it when it
        starts, in less than a second, and names it in the log line of its start.""",
    )
    draft_cost: Annotated[float, Field(ge=0)] | None = Field(
        default=SPECULATION.draft_cost,
        description="""For `draft`: the cost of a pass of the draft model, as a share of a step of one
        token. Unless set, a replica measures it as well.""",
    )

    @field_validator("max_draft_tokens", "ngram_size", "row_cost", "draft_cost")
    @classmethod
    def _of_a_method(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("method") == "off" and not cls.is_default(info.field_name, value):
            raise ValueError("is for speculation, and method is 'off'")
        return value

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
    """How a replica runs its steps."""

    attention: AttentionName = Field(
        default="auto",
        description="""On a GPU [`triton`, `flash` or `torch`](operations/gpus.md); on a CPU `cpu`, the
        [compiled kernels](platforms.md#kernels-for-processors), or `torch`. `auto` takes the first of
        them that can run.""",
    )
    graphs: bool = Field(
        default=True,
        description="On a GPU, steps are captured as CUDA graphs at start, and replayed.",
    )
    max_graph_tokens: PositiveInt = Field(
        default=256, description="The largest step that is captured, in tokens."
    )
    overlap: bool = Field(default=True, description="On a GPU, plan and launch the next step while one runs.")
    decode_steps: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="[Decode steps](operations/gpus.md) that run in one go while no request waits.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="[GPUs](operations/gpus.md) (or, on a CPU, processes) that hold one model between them.",
    )
    linear: LinearName = Field(
        default="auto",
        description="""What multiplies by the weights. `auto` is, on a GPU, the quickest way for each
        matrix, found at start; on a CPU, the [compiled kernels](platforms.md#kernels-for-processors)
        if there are any. `torch` is torch's own.""",
    )
    deterministic: bool = Field(
        default=False,
        description="""[The same log-probabilities](operations/same-bits.md) to the
        last bit, whatever else a replica computes.""",
    )

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
