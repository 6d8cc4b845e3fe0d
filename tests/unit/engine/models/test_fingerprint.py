"""The model's fingerprint is equal for equal files, and changes with any change that training or conversion makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.errors import BadCheckpoint
from engine.models.fingerprint import SMALL_BYTES, checkpoint_fingerprint, dummy_fingerprint
from engine.models.loader import load_model
from engine.settings import ModelSettings

EMBEDDED = "assets/models/kedge-chat"
CONFIG = {"hidden_size": 64, "rope_theta": 10000.0, "transformers_version": "5.0", "_name_or_path": "here"}
LARGE = 0
"""A limit above which a checkpoint counts as large. With 0 every checkpoint does."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(7)
    names = [f"layers.{number}.{part}" for number in range(4) for part in ("q", "k", "norm")]
    shapes = [(64, 300) if not name.endswith("norm") else (300,) for name in names]
    path = tmp_path / "model.safetensors"
    tensors = {n: torch.randn(s, generator=generator) for n, s in zip(names, shapes, strict=True)}
    save_file(tensors, path)
    return path


def changed(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path)
    change(tensors)
    other = path.with_name("changed") / path.name
    other.parent.mkdir(exist_ok=True)
    save_file(tensors, other)
    return other


def train_one_layer(tensors: dict[str, Tensor]) -> None:
    tensors["layers.2.q"] *= 1.0001


def merge_an_adapter(tensors: dict[str, Tensor]) -> None:
    tensors["layers.3.k"] += torch.outer(torch.ones(64), torch.ones(300)) * 1e-3


def train_a_norm(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.norm"] += 1e-3


def halve_the_precision(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["layers.9.q"] = tensors.pop("layers.2.q")


CHANGES = [train_one_layer, merge_an_adapter, train_a_norm, halve_the_precision, rename]


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, LARGE])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_another_fingerprint(
    checkpoint: Path, change: Callable[[dict[str, Tensor]], None], small_bytes: int
) -> None:
    other = changed(checkpoint, change)
    assert checkpoint_fingerprint(CONFIG, [other], small_bytes) != checkpoint_fingerprint(
        CONFIG, [checkpoint], small_bytes
    )


def test_of_a_small_checkpoint_every_value_counts(checkpoint: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.q"][40, 250] += 1.0

    other = changed(checkpoint, edit)
    assert checkpoint_fingerprint(CONFIG, [other]) != checkpoint_fingerprint(CONFIG, [checkpoint])


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, LARGE])
def test_the_same_files_elsewhere_have_the_same_fingerprint(checkpoint: Path, small_bytes: int) -> None:
    """Other folders, dates or writers of config.json do not make another model."""
    other = checkpoint.with_name("elsewhere") / checkpoint.name
    other.parent.mkdir()
    shutil.copyfile(checkpoint, other)
    config = {**CONFIG, "transformers_version": "4.1", "_name_or_path": "there"}
    assert checkpoint_fingerprint(config, [other], small_bytes) == checkpoint_fingerprint(
        CONFIG, [checkpoint], small_bytes
    )


def test_the_configuration_counts(checkpoint: Path) -> None:
    other = {**CONFIG, "rope_theta": 500000.0}
    assert checkpoint_fingerprint(other, [checkpoint]) != checkpoint_fingerprint(CONFIG, [checkpoint])


@pytest.mark.parametrize("header", [b"\xff" * 8, b'{"a": {"dtype": "F32"}}', b'{"a": 3}'])
def test_a_large_file_that_is_no_safetensors_file_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: not a safetensors file"):
        checkpoint_fingerprint(CONFIG, [path], LARGE)


def test_a_large_file_of_another_kind_is_read_here_and_there(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(100_000))
    before = checkpoint_fingerprint(CONFIG, [path], LARGE)
    path.write_bytes(bytes(99_990) + b"0123456789")
    assert checkpoint_fingerprint(CONFIG, [path], LARGE) != before


def test_random_weights_are_told_apart_by_what_makes_them() -> None:
    same = dummy_fingerprint(CONFIG, 1, "cpu")
    assert same == dummy_fingerprint(dict(CONFIG), 1, "cpu")
    assert same not in (dummy_fingerprint(CONFIG, 2, "cpu"), dummy_fingerprint(CONFIG, 1, "cuda"))


def test_a_loaded_model_has_the_fingerprint_of_its_checkpoint() -> None:
    first, second = (load_model(ModelSettings(EMBEDDED, dtype=dtype)) for dtype in ("auto", "bfloat16"))  # type: ignore[arg-type]
    assert first.fingerprint == second.fingerprint, "how the weights are held is no other model"
    dummy = load_model(ModelSettings(EMBEDDED, load_format="dummy"))
    assert dummy.fingerprint != first.fingerprint
