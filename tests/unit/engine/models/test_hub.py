"""Models of the hub are found by id and revision, here in the hub's own cache. Nothing is fetched."""

from __future__ import annotations

import traceback
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.utils import filter_repo_objects

from engine.models.errors import ModelNotFound
from engine.models.hub import find_model

COMMITS = {"main": "1" * 40, "v2": "2" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of one model, in the layout of the hub's library."""
    folder = tmp_path / "models--org--name"
    for reference, commit in COMMITS.items():
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / reference).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder / "snapshots"


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, COMMITS["main"]), ("v2", COMMITS["v2"]), (COMMITS["v2"], COMMITS["v2"])]
)
def test_a_revision_is_what_is_loaded(cache: Path, revision: str | None, commit: str) -> None:
    """There used to be no revision: a replica that started later could have other weights."""
    assert find_model("org/name", revision) == cache / commit


def test_a_revision_that_is_not_there_is_named(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="org/name at v3: not a directory"):
        find_model("org/name", "v3")
    assert cache.is_dir()


def test_a_model_that_cannot_be_fetched_is_told_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve prints the whole chain of errors at each of its tries: the reason stood below 150 lines of HTTP."""

    def fails(*_: object, **__: object) -> str:
        try:
            raise OSError("Name or service not known")
        except OSError as error:
            raise RuntimeError("no connection") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ModelNotFound) as caught:
        find_model("org/name")
    told = "".join(traceback.format_exception(caught.value))
    assert "org/name: not a directory, and not fetched from the hub: no connection" in told
    assert "direct cause" not in told
    assert "During handling" not in told


def test_files_below_the_top_folder_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS's repository has the same weights once more in a folder."""
    files = ["config.json", "model-1.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"]
    below = ["original/model.safetensors", "original/config.json", "metal/model.bin"]
    fetched: list[str] = []

    def download(_: str, *, revision: None, **patterns: list[str]) -> str:
        assert revision is None
        fetched.extend(filter_repo_objects(files + below, **patterns))
        return "there"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("org/name") == Path("there")
    assert fetched == files[:-1]


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFound, match="no such directory"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFound, match="~nosuchuser/a: no such directory"):
        find_model("~nosuchuser/a")
