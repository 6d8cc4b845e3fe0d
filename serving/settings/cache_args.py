"""Settings of where KV is: the pool of each replica, host memory and disk."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from engine.settings import BooksCheck, CacheSettings, KVDType
from serving.settings.settings_paths import state_path
from serving.settings.strict_settings import NotNegative, PositiveInt, StrictModel, yaml_off

HOST_MIB = 512
_MIB = 1024 * 1024


class CacheArgs(StrictModel):
    """Where KV is: in the pool of each replica, and for idle sessions also in host memory and on disk."""

    page_size: Annotated[int, Field(ge=1, le=256)] = Field(default=16, description="Tokens per KV page.")
    num_pages: PositiveInt | None = Field(
        default=None,
        description="The size of each replica's KV pool in pages, in place of `size_mib`.",
    )
    size_mib: PositiveInt | None = Field(
        default=None,
        description="""The size of each replica's KV pool in MiB. Without it and `num_pages`, a replica
        on a CPU has 256, on a GPU what `memory_share` leaves. A replica does not start with a pool that
        free memory cannot hold.""",
    )
    memory_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.9,
        description="On a GPU, the share of its memory that weights, activations and KV may take together.",
    )
    kv_dtype: KVDType = Field(
        default="auto",
        description="""`auto` stores KV in the type of the activations. [`fp8`](operations/gpus.md)
        (e4m3, with a scale for each token's head) needs attention `triton`.""",
    )
    prefix_cache: bool = Field(
        default=True, description="Share equal prefixes between requests and sessions."
    )
    window_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="""Sliding-window layers have a KV pool of their own. This is its number of pages,
        as a share of the other pool's.""",
    )
    host_mib: NotNegative | None = Field(
        default=None,
        description="""Host memory of each replica, in MiB, for idle sessions' KV that does not fit
        into the pool; at most what the machine or its container (cgroup v2) has. 0 turns it off.
        Without it and `host_share` it is 512.""",
    )
    host_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="""The same as a share of what the machine or its container has, for each replica:
        eight replicas on a machine with 0.1 take up to 80 % of its memory.""",
    )
    disk_mib: NotNegative = Field(
        default=0,
        description="""[Disk space](operations/memory.md#a-disk-below-the-host) of each replica, in MiB, for
        idle sessions' KV that does not fit into host memory. 0 turns it off. KV gets there by way of
        host memory, which must not be off.""",
    )
    disk_path: Annotated[str | None, Field(min_length=1, validate_default=True)] = Field(
        default=None,
        description="""The folder for KV on disk (relative paths as for `controller.state_dir`). It
        goes with `disk_mib`: each is refused without the other. It is made if it is missing, and
        replicas may share it.""",
    )
    disk_encrypted: bool = Field(
        default=False,
        description="""The files in `disk_path` are encrypted, under a key that each replica makes for
        itself and keeps in memory only.""",
    )
    books: Annotated[BooksCheck, BeforeValidator(yaml_off)] = Field(
        default="balance",
        description="""What is checked after every step: `off` nothing; `balance` that the page
        counters add up; `strict` every page, which is slow and meant for debugging. [What
        follows](design/kv-books.md#audit) if they do not.""",
    )

    @field_validator("size_mib")
    @classmethod
    def _in_place_of_pages(cls, size_mib: int | None, info: ValidationInfo) -> int | None:
        if size_mib is not None and info.data.get("num_pages") is not None:
            raise ValueError("give a size_mib or num_pages, not both")
        return size_mib

    @field_validator("memory_share")
    @classmethod
    def _of_a_pool_without_size(cls, share: float, info: ValidationInfo) -> float:
        sizes = [name for name in ("num_pages", "size_mib") if info.data.get(name) is not None]
        if sizes and not cls.is_default(info.field_name, share):
            raise ValueError(f"is what a pool without a size may take, and there is {sizes[0]}")
        return share

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
