"""A living process has its folder to itself. Whatever it leaves behind, the next process clears."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from engine import owned_folder
from engine.runner import disk_folder
from engine.runner.disk_folder import DiskFolder, DiskUnavailable
from tests.unit.folder_owners import another_process, folders

OWNER = """
import sys
from pathlib import Path
from engine.runner.disk_folder import DiskFolder
folder = DiskFolder(Path(sys.argv[1]))
folder.file("7").write_bytes(b"KV")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_made_private_and_goes_with_its_files(tmp_path: Path) -> None:
    root = tmp_path / "made" / "here"
    folder = DiskFolder(root)
    assert folders(root) == {folder.path}
    assert folder.path.stat().st_mode & 0o077 == 0, "KV is what was said"
    folder.file("1").write_bytes(b"KV")
    folder.close()
    assert folders(root) == set()


def test_two_replicas_share_a_path_and_neither_touches_the_others_files(tmp_path: Path) -> None:
    one = DiskFolder(tmp_path)
    one.file("1").write_bytes(b"one")
    other = DiskFolder(tmp_path)
    assert one.path != other.path
    other.file("1").write_bytes(b"other")
    other.close()
    third = DiskFolder(tmp_path)
    assert folders(tmp_path) == {one.path, third.path}
    assert one.file("1").read_bytes() == b"one"
    one.close()
    third.close()


def test_leftovers_of_a_killed_process_are_cleared_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    with another_process(OWNER, tmp_path) as (process, left):
        first = DiskFolder(tmp_path)
        assert (left / "7.kv").read_bytes() == b"KV", "its owner lives"
        process.kill()
        process.wait(30)
        assert folders(tmp_path) == {first.path, left}
        second = DiskFolder(tmp_path)
        assert folders(tmp_path) == {first.path, second.path}
    for folder in (first, second):
        folder.close()


def test_a_process_that_died_before_it_locked_its_folder_leaves_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "kedge-kv-abc").mkdir()
    folder = DiskFolder(tmp_path)
    assert folders(tmp_path) == {folder.path}
    folder.close()


def test_a_living_process_keeps_its_files_even_if_somebody_took_its_lock(tmp_path: Path) -> None:
    """Programs that tidy up /tmp remove old files, whoever has them open."""
    folder = DiskFolder(tmp_path)
    folder.file("1").write_bytes(b"KV")
    (folder.path / owned_folder.LOCK).unlink()
    DiskFolder(tmp_path).close()
    assert folder.file("1").read_bytes() == b"KV"
    folder.close()
    assert folders(tmp_path) == set()


def test_nothing_of_anybody_else_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = tmp_path / "kedge-kv-mine" / "letter.txt"
    foreign.parent.mkdir()
    foreign.write_text("dear")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.kv").write_text("x")
    DiskFolder(tmp_path).close()
    assert folders(tmp_path) == {foreign.parent, tmp_path / "photos"}
    assert foreign.read_text() == "dear"
    assert (tmp_path / "photos" / "a.kv").exists()
    assert "kedge-kv-mine could not be removed" in caplog.text


def test_many_start_and_stop_at_once(tmp_path: Path) -> None:
    failures: list[str] = []

    def replica() -> None:
        for _ in range(5):
            folder = DiskFolder(tmp_path)
            folder.file("1").write_bytes(b"mine")
            DiskFolder(tmp_path).close()
            if not folder.file("1").exists():
                failures.append("another start took a living owner's file")
            folder.close()

    threads = [threading.Thread(target=replica) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert folders(tmp_path) == set()


def test_a_path_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable, match=r"file/below \(cache\.disk_path\)"):
        DiskFolder(tmp_path / "file" / "below")


def test_a_start_that_hangs_holds_up_no_other_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_folder, "LOCK_WAIT_S", 0.1)
    with (
        owned_folder.locked(tmp_path, disk_folder.PREFIX),
        pytest.raises(DiskUnavailable, match="another process"),
    ):
        DiskFolder(tmp_path)
    DiskFolder(tmp_path).close()


def test_a_link_that_another_user_left_is_not_followed(tmp_path: Path) -> None:
    """Other users may be able to write to the shared folder. The lock used to be opened through a link, which emptied
    the file that the link led to. The files of a linked folder used to be taken for leftovers and removed."""
    root, theirs = tmp_path / "shared", tmp_path / "theirs"
    root.mkdir()
    theirs.mkdir()
    kept = [theirs / "precious", theirs / f"1{disk_folder.SUFFIX}"]
    for file in kept:
        file.write_text("kept")
    (root / f"{disk_folder.PREFIX}linked").symlink_to(theirs)
    (root / f"{disk_folder.PREFIX}{owned_folder.LOCK}").symlink_to(kept[0])
    with pytest.raises(DiskUnavailable, match="disk_path"):
        DiskFolder(root)
    (root / f"{disk_folder.PREFIX}{owned_folder.LOCK}").unlink()
    DiskFolder(root).close()
    assert [file.read_text() for file in kept] == ["kept", "kept"]


def test_the_shared_folder_and_its_lock_are_private(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        root = tmp_path / "made"
        DiskFolder(root).close()
    finally:
        os.umask(former)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / f"{disk_folder.PREFIX}{owned_folder.LOCK}").stat().st_mode) == 0o600
