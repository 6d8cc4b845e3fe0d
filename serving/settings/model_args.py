"""Settings of the model: which one, and how its text is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from engine.settings import AdapterSettings, DeviceName, DTypeName, LoadFormat, ModelSettings
from serving.settings.settings_paths import resolve_path
from serving.settings.strict_settings import Name, NotEmpty, PositiveInt, StrictModel, yaml_off
from serving.text.reasoning.formats import ReasoningSetting
from serving.text.tool_calls.formats import ToolCallsSetting

ADAPTER_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _model_id(name: str | None, path: str) -> str:
    return name or Path(path).name


class ModelArgs(StrictModel):
    """Which model is served, and how its text is read."""

    path: NotEmpty = Field(
        description="A local Hugging Face directory, or a hub id. A relative path starts at the repository.",
    )
    name: NotEmpty | None = Field(
        default=None,
        description="The model's id in the APIs. Unless set, it is the last part of `path`.",
    )
    load_format: LoadFormat = Field(
        default="auto",
        description="`auto` reads safetensors; `dummy` makes random weights of the directory's config.",
    )
    dtype: DTypeName = Field(
        default="auto",
        description="`auto` is float32 on a CPU, and the checkpoint's own on a GPU.",
    )
    device: DeviceName = Field(default="auto", description="`auto` takes a GPU if the replica has one.")
    seed: int = Field(default=0, description="The random seed of `dummy` weights.")
    num_threads: PositiveInt | None = Field(
        default=None,
        description="""CPU threads of one replica. Unless set, torch decides. With several replicas on
        a machine, share its cores out.""",
    )
    tool_calls: Annotated[ToolCallsSetting, BeforeValidator(yaml_off)] = Field(
        default="auto",
        description="""The format of the model's function calls: `hermes` (Qwen 2.5 and 3, Hermes),
        `llama3` (JSON), `mistral` (a list of calls), `mistral_v11` (`[ARGS]`), `mistral_call_id`
        (`[CALL_ID]`), `deepseek_v3`, `deepseek_v31`, `deepseek_v32`, `qwen3_coder` (Qwen3-Coder and
        Qwen 3.5), `glm45`, `glm47`, `gpt_oss`, `pythonic` (Llama 3.2 and 4, a list of Python's calls).
        `auto` takes the one that the chat template teaches. `off` refuses `tools`.""",
    )
    reasoning: Annotated[ReasoningSetting, BeforeValidator(yaml_off)] = Field(
        default="auto",
        description="""The format of the thoughts that the model writes before its answer; replies have
        them apart from the answer. `think` is `<think>` (Qwen3, DeepSeek, GLM), `magistral` is
        `[THINK]`, `gpt_oss` is channels. `auto` takes the format of the chat template. `off` leaves the
        thoughts in the answer.""",
    )
    revision: NotEmpty | None = Field(
        default=None,
        description="""A commit, tag or branch of a hub id; unless set, the main branch. Name a commit:
        a branch may have other weights when the next replica starts.""",
    )
    generation_config: Annotated[Literal["auto", "off"], BeforeValidator(yaml_off)] = Field(
        default="auto",
        description="""`auto` takes the model's file `generation_config.json` for the defaults of
        `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` in chat and text completions,
        Responses and Messages; its `max_new_tokens` limits every answer there. `/generate` has its own
        defaults. `off` ignores the file.""",
    )
    aliases: list[NotEmpty] = Field(
        default_factory=list,
        description="""Other names that requests may give the model, for clients that insist on a name.
        `/v1/models` lists them after the model's own name, which is the one in replies.""",
    )
    adapters: dict[Name, NotEmpty] = Field(
        default_factory=dict,
        description="""[LoRA adapters](operations/adapters.md) by the names that requests give as their
        model: `{name: path}`, a directory or a hub id each.""",
    )
    keep_fp8: bool = Field(
        default=False,
        description="On a GPU, matrices that the checkpoint has in fp8 [stay so in memory](operations/gpus.md).",
    )

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

    @field_validator("seed")
    @classmethod
    def _of_random_weights(cls, seed: int, info: ValidationInfo) -> int:
        if seed and info.data.get("load_format") == "auto":
            raise ValueError(
                "is of the random weights of load_format 'dummy'; requests have a seed of their own"
            )
        return seed

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
