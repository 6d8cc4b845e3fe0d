"""The compiled CPU kernels: finds, checks and declares them.

They are built from engine/cpu/source/ when the project is installed (setup.py), once for each kind of CPU of this
architecture. Where no compiler was found there are none, and torch's operators do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

FOLDER = Path(__file__).parent
VARIANTS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""The best first. The names are those of setup.py."""

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, FLOAT8, FLOAT4 = range(7)
"""Formats of weights, as in product.h."""

LARGEST_HEAD = 576
MOST_WINDOWS = 8


class MatrixC(Structure):
    """Matrix of product.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("paired", c_int32),
        ("rounds", c_int32),
        ("group", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    )


class ItemC(Structure):
    """Item of attention.h."""

    _fields_ = (
        ("pages", c_void_p),
        ("window_pages", c_void_p),
        ("row", c_int32),
        ("queries", c_int32),
        ("length", c_int32),
        ("table_len", c_int32),
        ("window_table_len", c_int32),
    )


class ItemsC(Structure):
    """Items of attention.h."""

    _fields_ = (
        ("items", c_void_p),
        ("count", c_int32),
        ("rows", c_int32),
        ("page_size", c_int32),
        ("deterministic", c_int32),
    )


class LayerKVC(Structure):
    """LayerKV of attention.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("head_stride", c_int64),
        ("in_window_pool", c_int32),
        ("window", c_int32),
        ("num_pages", c_int32),
    )


class HeadsC(Structure):
    """Heads of attention.h."""

    _fields_ = (("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("value_dim", c_int32))


class ExpertsC(Structure):
    """Experts of experts.h."""

    _fields_ = (
        ("router", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("correction", c_void_p),
        ("count", c_int32),
        ("top_k", c_int32),
        ("norm_topk", c_int32),
        ("sigmoid", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("factor", c_float),
    )


class LatentsC(Structure):
    """Latents of latents.h."""

    _fields_ = (
        ("query_up", c_void_p),
        ("key_ups", c_void_p),
        ("value_ups", c_void_p),
        ("plain_ups", c_void_p),
        ("query_norm", c_void_p),
        ("latent_norm", c_void_p),
        ("query_rank", c_int32),
        ("rank", c_int32),
        ("plain_dim", c_int32),
        ("rotary_dim", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


class LayerC(Structure):
    """Layer of decoder.c."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("head_norm", c_void_p),
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("experts", c_void_p),
        ("latents", c_void_p),
    )


class UpdateC(Structure):
    """Update of adapters.h."""

    _fields_ = (("a", MatrixC), ("b", MatrixC))


class AdaptersC(Structure):
    """Adapters of adapters.h."""

    _fields_ = (
        ("updates", c_void_p),
        ("first", POINTER(c_int32)),
        ("whose", POINTER(c_int32)),
        ("spans", c_int32),
        ("num_layers", c_int32),
    )


class ModelC(Structure):
    """Model of decoder.c."""

    _fields_ = (
        ("layers", c_void_p),
        ("rotations", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
        ("heads", HeadsC),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("num_positions", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


MATRIX = POINTER(MatrixC)

DONE, NO_MEMORY, BAD_TABLE, BAD_POSITION = 0, 1, 2, 3
"""The outcome of a call, as in attention.h."""


def check(outcome: int, what: str) -> None:
    """Raises MemoryError or IndexError; nothing was computed then. `what` names the step for the error message."""
    if outcome == NO_MEMORY:
        raise MemoryError(f"{what} (scheduler.max_batch_tokens)")
    if outcome != DONE:
        raise IndexError(
            f"{what}: {'a page table' if outcome == BAD_TABLE else 'a position'} that does not exist"
        )


SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kedge_team_new": (c_void_p, (c_int,)),
    "kedge_team_free": (None, (c_void_p,)),
    "kedge_packed_bytes": (c_size_t, (MATRIX,)),
    "kedge_pack": (None, (MATRIX, c_void_p, c_void_p)),
    "kedge_pack_quantized": (None, (MATRIX, c_void_p, c_void_p, c_void_p, c_void_p)),
    "kedge_pack_bias": (None, (MATRIX, c_void_p, c_void_p)),
    "kedge_product_width": (c_int, (MATRIX,)),
    "kedge_product_scratch": (c_size_t, (MATRIX, c_int, c_void_p)),
    "kedge_product": (
        None,
        (c_void_p, MATRIX, c_int, c_void_p, c_int, c_void_p, c_int, c_int, c_void_p),
    ),
    "kedge_attention_new": (c_void_p, ()),
    "kedge_attention_free": (None, (c_void_p,)),
    "kedge_attention_layer": (c_int, (c_void_p,) * 8),
    "kedge_decoder_new": (c_void_p, (c_void_p,)),
    "kedge_decoder_free": (None, (c_void_p,)),
    "kedge_decoder_step": (c_int, (c_void_p,) * 7),
    "kedge_decoder_head": (c_int, (c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
}


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """One build, for a CPU like this machine's. `sources` is the digest of what it was built from. Calls of `c` release
    the GIL."""

    variant: str
    sources: str
    c: ctypes.CDLL

    @property
    def build(self) -> str:
        """Builds of the same name sum in the same order, but for the compiler."""
        return f"{self.variant} {self.sources}"


@dataclass(frozen=True, slots=True)
class NoKernels:
    """Why there are none; `reason` is for people."""

    reason: str


def find_kernels(folder: Path = FOLDER, variants: Sequence[str] | None = None) -> Kernels | NoKernels:
    """The first build in the folder that runs here; those come last that are slower here than the next. With `variants`
    only these, in this order. No build of another processor is opened."""
    processor = _processor(folder)
    if isinstance(processor, NoKernels):
        return processor
    reasons = []
    if variants is None:
        variants = sorted(VARIANTS, key=lambda variant: not processor.kedge_processor_gains(variant.encode()))
    for variant in variants:
        path = _file(folder, variant)
        if not path.is_file() or not processor.kedge_processor_runs(variant.encode()):
            continue
        try:
            c = ctypes.CDLL(str(path))
            found = _sources_of(c)
        except (OSError, AttributeError) as error:
            reasons.append(f"{path.name}: {error}")
            continue
        if found != (expected := _sources_digest(folder / "source")) and expected is not None:
            reasons.append(f"{path.name} was built from other sources: install the project again")
            continue
        _declare(c)
        return Kernels(variant, found, c)
    return NoKernels("; ".join(reasons) or "no kernels were compiled for this processor (docs/platforms.md)")


def _processor(folder: Path) -> ctypes.CDLL | NoKernels:
    """What says which variants run here. Its code runs on any CPU of the architecture."""
    path = _file(folder, "processor")
    if not path.is_file():
        return NoKernels("no kernels were compiled when Kedge was installed (docs/platforms.md)")
    try:
        processor = ctypes.CDLL(str(path))
        for function in (processor.kedge_processor_runs, processor.kedge_processor_gains):
            function.argtypes, function.restype = (c_char_p,), c_int
    except (OSError, AttributeError) as error:
        return NoKernels(f"{path.name}: {error}")
    return processor


def _file(folder: Path, name: str) -> Path:
    return folder / f"_{name}{EXTENSION_SUFFIXES[0]}"


def _sources_digest(folder: Path) -> str | None:
    """Digest of the C files, as setup.py makes it; None where they are not installed."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"\0".join(map(Path.read_bytes, files))).hexdigest()[:16] if files else None


def _sources_of(c: ctypes.CDLL) -> str:
    c.kedge_sources.restype = c_char_p
    found: bytes = c.kedge_sources()
    return found.decode()


def _declare(c: ctypes.CDLL) -> None:
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(c, name)
        function.restype = result
        function.argtypes = arguments


class Workers:
    """The threads that compute a step: the caller's, and `threads` - 1 that sleep between steps."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.kernels = kernels
        self.team = kernels.c.kedge_team_new(threads)
        if not self.team:
            raise MemoryError(f"no {threads} threads are to be had (model.num_threads)")
        self._free = kernels.c.kedge_team_free

    def __del__(self) -> None:
        if getattr(self, "team", None):
            self._free(self.team)
