"""The shipped configuration for GPUs, served through Ray Serve with a random model, as a cluster of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.gpu.engines import config_of
from benchmarks.gpu.stage import Stage
from tests.cluster.served_cluster import ROOT, ServedCluster

CONFIG = ROOT / "configs" / "cluster-gpu.yaml"
RUN = "from serving.cli.main import main; main()"
RUN_HAPROXY = "from serving.cli.commands.haproxy import main; main()"
"""In place of the commands `kedge` and `kedge-haproxy`, which a checkout that is not installed lacks."""

OBJECT_STORE_BYTES = 256 * 1024 * 1024
TAIL_CHARACTERS = 2000
TAILS = 4


class Server(ServedCluster):
    """`kedge serve` from the checkout. Unless `sound` is set, `stop` prints the ends of its logs."""

    def __init__(self, stage: Stage, folder: Path, args: dict[str, dict[str, Any]], limit_s: float) -> None:
        def edit(document: dict[str, Any]) -> None:
            document["applications"][0]["args"].update(args)

        super().__init__(CONFIG, edit)
        self.sound = False
        self.kedge = [sys.executable, "-c", RUN]
        self.start_timeout_s = limit_s
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        resources = {"CPU": os.cpu_count(), "GPU": 0 if stage.dry else 1}
        self.environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "RAY_OVERRIDE_RESOURCES": json.dumps(resources | {"object_store_memory": OBJECT_STORE_BYTES}),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(_haproxy_command(folder)),
        }

    def stop(self) -> None:
        if not self.sound:
            self._print_logs()
        directory = f"RAY_TMPDIR={self.directory}".encode()
        super().stop()
        for pid in marked(directory):  # a raylet that was killed leaves its workers for a moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _print_logs(self) -> None:
        """The newest files last: a failure is told by who wrote last."""
        folders = (self.directory / "ray").glob("session_2*/logs")
        found = [path for folder in folders for path in folder.rglob("*") if _worth_reading(path)]
        newest = sorted(found, key=lambda path: path.stat().st_mtime)[-TAILS:]
        for path in (*newest, self.log):
            with contextlib.suppress(OSError):
                text = path.read_text(errors="replace")
                print(f"--- the end of {path.name}:\n{text[-TAIL_CHARACTERS:]}", flush=True)


def _worth_reading(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    return path.parent.name == "serve" or (path.name.startswith("worker-") and path.suffix == ".err")


def marked(mark: bytes) -> Iterator[int]:
    """Processes that have this entry in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in path.joinpath("environ").read_bytes().split(b"\0"):
                yield int(path.name)
        except OSError:
            continue


def _haproxy_command(folder: Path) -> Path:
    path = folder / "kedge-haproxy"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{RUN_HAPROXY}" "$@"\n')
    path.chmod(0o755)
    return path


def write_model(stage: Stage, shape: str, folder: Path) -> dict[str, Any]:
    """A model's directory with a configuration and a tokenizer, and no weights. Returns the configuration. Every token
    is a blank and some letters, so that each is a piece of text by itself."""
    import torch

    config = config_of(shape, torch.float32 if stage.dry else torch.bfloat16)
    size = config["vocab_size"]
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    vocab = {word: index for index, word in zip(range(size), words, strict=False)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return config
