"""A read returns what was written, or is an error."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.runner.disk_encryption import Encrypted
from engine.runner.disk_folder import DiskFolder
from engine.runner.disk_format import Checked
from engine.runner.disk_store import DiskFault, DiskStore


@pytest.fixture(params=[Checked, Encrypted])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(DiskFolder(tmp_path), request.param())
    yield made
    made.close()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def tensors() -> list[Tensor]:
    """Tensors of several dtypes, one of them empty."""
    numbers = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    return [numbers, numbers.to(torch.bfloat16), numbers.to(torch.uint8), torch.empty(2, 0, 3)]


def read(store: DiskStore, key: int) -> list[Tensor]:
    return list(store.read(key, map(torch.empty_like, tensors())))


def file_of(store: DiskStore, key: int) -> Path:
    return Path(store.path) / f"{key}.kv"


def test_the_same_bits_come_back(store: DiskStore) -> None:
    store.write(1, tensors())
    store.write(2, [torch.ones(4)])
    assert 1 in store
    assert all(map(torch.equal, read(store, 1), tensors()))
    store.remove(1)
    assert 1 not in store
    assert not file_of(store, 1).exists()
    assert torch.equal(next(store.read(2, [torch.zeros(4)])), torch.ones(4))


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """Lets the file system accept only the first bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_nothing(store: DiskStore) -> None:
    with files_no_larger_than(300), pytest.raises(OSError, match="too large"):
        store.write(1, tensors())
    assert 1 not in store
    assert not file_of(store, 1).exists()
    store.write(1, tensors())
    assert all(map(torch.equal, read(store, 1), tensors()))


def test_a_folder_that_has_gone_fails_the_write(store: DiskStore) -> None:
    shutil.rmtree(store.path)
    with pytest.raises(FileNotFoundError):
        store.write(1, tensors())
    assert 1 not in store


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def cut_within_the_first_tensor(file: Path) -> None:
    os.truncate(file, 100)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [shorten, cut_within_the_first_tensor, flip_a_bit, Path.unlink])
def test_a_file_that_is_not_what_was_written_is_an_error(
    store: DiskStore, damage: Callable[[Path], None]
) -> None:
    store.write(1, tensors())
    damage(file_of(store, 1))
    with pytest.raises(OSError, match=re.escape(str(file_of(store, 1)))):
        read(store, 1)
    store.remove(1)


def test_a_store_that_closes_lets_no_write_hold_it_up(store: DiskStore) -> None:
    store.stop()
    with pytest.raises(DiskFault, match="closing"):
        store.write(1, tensors())
    assert not file_of(store, 1).exists()


def test_encrypted_files_have_nothing_of_what_was_written(tmp_path: Path) -> None:
    bits = os.urandom(2**16)
    kv = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    for form, plain in ((Checked(), True), (Encrypted(), False)):
        store = DiskStore(DiskFolder(tmp_path), form)
        store.write(1, [kv])
        assert (bits[:32] in file_of(store, 1).read_bytes()) == plain
        assert torch.equal(next(store.read(1, [torch.empty_like(kv)])), kv)
        store.close()
