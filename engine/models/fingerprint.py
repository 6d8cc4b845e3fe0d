"""Which model this is: a fingerprint of configuration and weights, equal on every machine with the same files.

All bytes of a small checkpoint count. A large one would take seconds to minutes to read, so of it these count: names,
types, shapes and order of all tensors, the size of each file, and two blocks of each tensor. Training, merging an
adapter or quantizing changes nearly every value, and so the fingerprint; an edit of a few rows by hand may not. In
files that are not safetensors, blocks are read at equal distances.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from engine.models.errors import BadCheckpoint

SMALL_BYTES = 256 * 1024 * 1024
BLOCK_BYTES = 4096
SPREAD_BLOCKS = 1024
FINGERPRINT_BYTES = 16
_LENGTH_BYTES = 8  # safetensors: the header's length, little endian
_READ_BYTES = 1 << 20


def checkpoint_fingerprint(
    config: Mapping[str, Any], files: Sequence[Path], small_bytes: int = SMALL_BYTES
) -> str:
    """The fingerprint of a model with these weights. `files` may lie anywhere; up to `small_bytes` of them are read
    whole.

    Raises BadCheckpoint if a file is not what its name says.
    """
    digest = blake2b(_canonical(config), digest_size=FINGERPRINT_BYTES)
    whole = sum(path.stat().st_size for path in files) <= small_bytes
    for path in files:
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            for part in _all(file) if whole else _sample(file, path):
                digest.update(part)
    return digest.hexdigest()


def dummy_fingerprint(config: Mapping[str, Any], seed: int, device: str) -> str:
    """The fingerprint of a model with random weights, which also depend on the kind of device."""
    digest = blake2b(_canonical(config), digest_size=FINGERPRINT_BYTES)
    digest.update(json.dumps(["dummy", seed, device]).encode())
    return digest.hexdigest()


def _canonical(config: Mapping[str, Any]) -> bytes:
    """The configuration without what only says who wrote the file."""
    said = {k: v for k, v in config.items() if not k.startswith("_") and k != "transformers_version"}
    return json.dumps(said, sort_keys=True).encode()


def _all(file: BinaryIO) -> Iterator[bytes]:
    while part := file.read(_READ_BYTES):
        yield part


def _sample(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        yield from _sample_tensors(file)
        return
    size = path.stat().st_size
    for number in range(SPREAD_BLOCKS):
        file.seek(size * number // SPREAD_BLOCKS)
        yield file.read(BLOCK_BYTES)


def _sample_tensors(file: BinaryIO) -> Iterator[bytes]:
    """The header, and the first and the middle block of each tensor."""
    length = file.read(_LENGTH_BYTES)
    header = file.read(int.from_bytes(length, "little"))
    yield length + header
    start = _LENGTH_BYTES + len(header)
    try:
        tensors = {
            name: info["data_offsets"] for name, info in json.loads(header).items() if name[:2] != "__"
        }
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{file.name}: not a safetensors file: {error}") from error
    for begin, end in sorted(tensors.values()):
        for offset in (begin, (begin + end) // 2):
            file.seek(start + offset)
            yield file.read(min(BLOCK_BYTES, end - offset))
