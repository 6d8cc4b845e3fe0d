"""Where a model's files are: in a directory, or on the hub, from which they are fetched."""

from __future__ import annotations

import os
from pathlib import Path

from engine.models.errors import ModelNotFound

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
"""Weights only as safetensors: reading other formats can run code."""

IGNORED_FILES = ["*/*"]
"""Nothing below the top folder is read. GPT-OSS has the same weights there in other forms."""


def find_model(path: str, revision: str | None = None) -> Path:
    """A local directory as it is. Anything else is a hub id, fetched into the hub's cache at that commit, tag or branch
    (None: its main branch). Raises ModelNotFound."""
    directory = Path(os.path.expanduser(path))  # pathlib's raises for a user that is not known
    if directory.is_dir():
        return directory
    if path.count("/") > 1 or path.startswith((".", "~")):
        raise ModelNotFound(f"{path}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=IGNORED_FILES
            )
        )
    except Exception as error:
        at = "" if revision is None else f" at {revision}"
        told = f"{path}{at}: not a directory, and not fetched from the hub: {error or type(error).__name__}"
        # Ray Serve prints at each try what an error came from: here, 150 lines of HTTP.
        raise ModelNotFound(told) from None
