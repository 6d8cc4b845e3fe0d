"""Where weights come from: two sources of the tensors that a model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine.models.config import ModelSpec, read_json
from engine.models.errors import BadCheckpoint, ModelNotFound
from engine.models.fp8_weights import SCALES, STORED, UNREAD
from engine.models.mxfp4_weights import Mxfp4Format, by_expert
from engine.models.packed_weights import PackedFormat
from engine.models.quantized_matrix import QuantizedMatrix
from engine.models.shares import Shares
from engine.models.tensor_shapes import CORRECTION, tensor_shapes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DUMMY_SCALE = 0.02
DUMMY_FP8 = 32.0
"""The standard deviation of random fp8 numbers, far below the largest, 448."""
CPU = torch.device("cpu")
CHECKPOINT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightSource(Protocol):
    """Returns each tensor of `tensor_shapes`, or this rank's part of it, in the dtype that the model is held in, on its
    device."""

    def take(self, name: str) -> Tensor: ...


class CheckpointWeights:
    """The safetensors of a directory, one file or sharded. Opening checks names and shapes. Reading is lazy: each
    tensor, or this rank's part of it, goes from the file to the device.

    `spec` is that of the whole model. Raises BadCheckpoint that names the tensors that are missing, left over or of
    another shape.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device = CPU,
        shares: Shares | None = None,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._shares = shares or Shares(spec, 0, 1)
        self._fp8 = spec.fp8
        self._packed = spec.packed
        self._shapes = tensor_shapes(spec)
        self._stack = ExitStack()
        self._files = {path: self._open(path) for path in weight_files(directory)}
        self._file_of = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        self._packed_of = self._find_packed()
        self._check(directory, spec)

    def take(self, name: str) -> Tensor:
        part, wide = self._shares.part(name), self._multiplied(name)
        dtype = torch.float32 if name.endswith(CORRECTION) else self._dtype
        if wide is not None:
            return (wide if part is None else part.of(wide)).to(dtype).contiguous()
        file = self._file_of[name]
        if part is None:
            whole: Tensor = file.get_tensor(name)
            return whole.to(dtype)
        read: Tensor = file.get_slice(name)[(slice(None),) * part.dim + (slice(part.start, part.stop),)]
        return part.padded(read).to(dtype).contiguous()

    def take_quantized(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored; None if that is not quantized, has groups that are not one after another, or if
        this rank has a part of it only."""
        if self._shares.part(name) is not None:
            return None
        if name in self._packed_of:
            assert self._packed is not None
            return self._packed.kept(self._packed_tensors(name), *self._shapes[name])
        return self._fp8_matrix(name)

    def close(self) -> None:
        self._stack.close()

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt", device=str(self._device)))
        except Exception as error:
            raise BadCheckpoint(f"{path}: {error}") from error

    def _find_packed(self) -> dict[str, dict[str, str]]:
        """The tensors, by their field, of each matrix that is stored as packed integers."""
        if self._packed is None:
            return {}
        found = {}
        for name in self._shapes.keys() - self._file_of.keys():
            beside = {field: name.removesuffix("weight") + field for field in self._packed.fields}
            tensors = {field: tensor for field, tensor in beside.items() if tensor in self._file_of}
            if tensors.keys() >= self._packed.needed:
                found[name] = tensors
        return found

    def _packed_tensors(self, name: str) -> dict[str, Tensor]:
        return {field: self._file_of[each].get_tensor(each) for field, each in self._packed_of[name].items()}

    def _multiplied(self, name: str) -> Tensor | None:
        """The whole matrix in float32, if it is stored in fp8 or packed integers."""
        if name in self._packed_of:
            assert self._packed is not None
            return self._packed.multiplied(self._packed_tensors(name), *self._shapes[name])
        matrix = self._fp8_matrix(name)
        return None if matrix is None else matrix.multiplied(torch.float32)

    def _fp8_matrix(self, name: str) -> QuantizedMatrix | None:
        scale_name = self._scale_of(name)
        if scale_name is None:
            return None
        assert self._fp8 is not None
        scale = self._file_of[scale_name].get_tensor(scale_name)
        return self._fp8.kept(self._file_of[name].get_tensor(name), scale)

    def _check_packed(self, directory: Path) -> set[str]:
        """Checks the shapes of packed integers, and returns the names of all tensors that belong to them. Some packers
        of gptq add a bias of zeros where the model has none."""
        belonging: set[str] = set()
        for name, tensors in self._packed_of.items():
            assert self._packed is not None
            shapes = self._packed.shapes(*self._shapes[name])
            for field, tensor in tensors.items():
                stored = self._file_of[tensor].get_slice(tensor)
                found, dtype = tuple(stored.get_shape()), stored.get_dtype()
                asked = self._packed.dtypes.get(field)
                if asked not in (None, dtype):
                    raise BadCheckpoint(f"{directory}: {tensor} has the type {dtype}, not {asked}")
                if found != shapes[field]:
                    raise BadCheckpoint(
                        f"{directory}: {tensor} is {found}, the configuration asks for {shapes[field]}"
                    )
            belonging |= set(tensors.values())
            bias = f"{name.removesuffix('weight')}bias"
            if (
                bias in self._file_of
                and bias not in self._shapes
                and not self._file_of[bias].get_tensor(bias).any()
            ):
                belonging.add(bias)
        return belonging

    def _check(self, directory: Path, spec: ModelSpec) -> None:
        expected = {name: shape for name, shape in self._shapes.items() if name not in self._packed_of}
        ignored = {name for name in self._file_of if name.endswith("rotary_emb.inv_freq")}
        if spec.tied_embeddings:
            ignored.add("lm_head.weight")
        unread = tuple(f"model.layers.{spec.num_layers + index}." for index in range(spec.num_mtp_layers))
        ignored |= {name for name in self._file_of if name.startswith(unread)}
        ignored |= self._check_fp8(directory, expected) | self._check_packed(directory)
        missing = sorted(expected.keys() - self._file_of.keys())
        left_over = sorted(self._file_of.keys() - expected.keys() - ignored)
        if missing:
            raise BadCheckpoint(f"{directory}: missing weights: {_some(missing)}")
        left_over = [name for name in left_over if 0 not in self._file_of[name].get_slice(name).get_shape()]
        if left_over:
            raise BadCheckpoint(f"{directory}: weights nothing reads: {_some(left_over)}")
        for name, shape in expected.items():
            found = tuple(self._file_of[name].get_slice(name).get_shape())
            if found != shape:
                raise BadCheckpoint(f"{directory}: {name} is {found}, the configuration asks for {shape}")

    def _scale_of(self, name: str) -> str | None:
        """The tensor with the scales of a matrix that is stored in fp8; None if it is stored in another dtype."""
        if self._file_of[name].get_slice(name).get_dtype() != STORED:
            return None
        return next((scale for scale in _beside(name, SCALES) if scale in self._file_of), None)

    def _check_fp8(self, directory: Path, expected: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Checks the scales of what is stored in fp8, and returns the names of all tensors that belong to it."""
        belonging: set[str] = set()
        for name in expected.keys() & self._file_of.keys():
            stored = self._file_of[name].get_slice(name)
            if stored.get_dtype() != STORED:
                continue
            if self._fp8 is None:
                raise BadCheckpoint(
                    f"{directory}: {name} is in fp8, but config.json has no quantization_config"
                )
            scale = self._scale_of(name)
            if scale is None:
                raise BadCheckpoint(f"{directory}: {name} is in fp8 and has no {' or '.join(SCALES)}")
            found, shape = self._file_of[scale].get_slice(scale).get_shape(), stored.get_shape()
            if len(shape) != 2 or not self._fp8.fits(found, shape):
                raise BadCheckpoint(
                    f"{directory}: {scale} is {tuple(found)}, which does not fit {tuple(shape)}"
                )
            belonging |= {scale, *_beside(name, UNREAD)}
        return belonging


def _beside(name: str, kinds: Sequence[str]) -> list[str]:
    """Tensors of the same layer as the weight `name`."""
    return [f"{name.removesuffix('weight')}{kind}" for kind in kinds]


class DummyWeights:
    """Random weights in the configuration's dtype, as if from a checkpoint. They depend only on the seed, the order of
    names and the kind of device; several ranks hold parts of the same tensors. Norms are one, biases zero.

    They are made on the device: on a GPU this takes seconds for a large model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        seed: int,
        device: torch.device = CPU,
        shares: Shares | None = None,
    ) -> None:
        """`spec` is that of the whole model."""
        self._shapes = tensor_shapes(spec)
        self._index = {name: index for index, name in enumerate(self._shapes)}
        self._dtype = dtype
        self._stored_dtype = CHECKPOINT_DTYPES[spec.checkpoint_dtype]
        self._seed = seed
        self._device = device
        self._shares = shares or Shares(spec, 0, 1)
        self._fp8 = spec.fp8
        self._packed = spec.packed

    def take(self, name: str) -> Tensor:
        matrix, part = self._make_quantized(name), self._shares.part(name)
        whole = self._make(name) if matrix is None else matrix.multiplied(self._dtype)
        if matrix is not None and isinstance(self._packed, Mxfp4Format):
            whole = by_expert(whole, self._shapes[name][0])
        if part is None:
            return whole.to(self._dtype)
        return part.of(whole).to(self._dtype, copy=True, memory_format=torch.contiguous_format)

    def take_quantized(self, name: str) -> QuantizedMatrix | None:
        return self._make_quantized(name) if self._shares.part(name) is None else None

    def _make_quantized(self, name: str) -> QuantizedMatrix | None:
        """Projections of a configuration with quantized weights."""
        if isinstance(self._packed, Mxfp4Format):
            return self._make_mxfp4(name) if ".experts." in name and not name.endswith("_bias") else None
        if "_proj" not in name or not name.endswith(".weight"):
            return None
        return self._make_integers(name) if self._packed is not None else self._make_fp8(name)

    def _make_integers(self, name: str) -> QuantizedMatrix:
        """Half the range is the zero."""
        assert isinstance(self._packed, PackedFormat)
        zero, (outputs, inputs) = 2 ** (self._packed.bits - 1), self._shapes[name]
        wide_OI = self._make(name).float() * (zero / 4 / DUMMY_SCALE) + zero
        scales_OB = torch.full(
            (outputs, -(-inputs // (self._packed.group or inputs))),
            DUMMY_SCALE * 4 / zero,
            device=self._device,
        )
        return QuantizedMatrix(
            wide_OI.round_().clamp_(0, 2 * zero - 1).to(torch.uint8),
            scales_OB,
            self._packed.group or inputs,
            torch.full_like(scales_OB, zero, dtype=torch.uint8),
            self._packed.bits,
        )

    def _make_mxfp4(self, name: str) -> QuantizedMatrix:
        """Any code, and scales that leave weights of the usual size."""
        assert isinstance(self._packed, Mxfp4Format)
        experts, inputs, outputs = self._shapes[name]
        stored = {}
        for field, shape in self._packed.shapes(experts, inputs, outputs).items():
            low, high = (0, 256) if field == "_blocks" else (118, 122)
            stored[field] = torch.randint(
                low, high, shape, dtype=torch.uint8, device=self._device, generator=self._generator(name)
            )
        return self._packed.kept(stored, experts, inputs, outputs)

    def _make_fp8(self, name: str) -> QuantizedMatrix | None:
        """A scale for each block, or row if there are no blocks."""
        if self._fp8 is None:
            return None
        values_OI = (self._make(name) * (DUMMY_FP8 / DUMMY_SCALE)).to(torch.float8_e4m3fn)
        outputs, inputs = values_OI.shape
        rows, columns = self._fp8.block or (1, inputs)
        scale = torch.linspace(0.5, 1.5, -(-outputs // rows) * -(-inputs // columns), device=self._device)
        shaped = scale.view(-(-outputs // rows), -(-inputs // columns)) * (DUMMY_SCALE / DUMMY_FP8)
        return self._fp8.kept(values_OI, shaped)

    def _make(self, name: str) -> Tensor:
        shape, device = self._shapes[name], self._device
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=device)
        if name.endswith(("bias", ".sinks")):
            return torch.zeros(shape, dtype=self._dtype, device=device)
        stored = torch.empty(shape, dtype=self._stored_dtype, device=device)
        return stored.normal_(0.0, DUMMY_SCALE, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + self._index[name])


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint, in order. Raises BadCheckpoint, ModelNotFound, or UnsupportedModel if the index is not
    a JSON object."""
    index = directory / INDEX_FILE
    if index.is_file():
        file_of = read_json(index).get("weight_map")
        files = list(file_of.values()) if isinstance(file_of, dict) else []
        if not files or not all(isinstance(name, str) for name in files):
            raise BadCheckpoint(f"{index}: weight_map must name the file of each tensor")
        names = sorted(set(files))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise BadCheckpoint(f"{directory}: shards named by {INDEX_FILE} are absent: {_some(absent)}")
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    raise ModelNotFound(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _some(names: list[str]) -> str:
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
