"""A process that was killed leaves its socket files behind. The next one that listens removes them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from controllers.records import SocketAddress
from serving.wire.peer_sockets import PeerSockets
from tests.unit.folder_owners import another_process, folders

LISTENER = """
import asyncio
import sys
import tempfile
from controllers.records import SocketAddress
from serving.wire.peer_sockets import PeerSockets

async def main():
    sockets = PeerSockets("127.0.0.1", set(), node_id="n1", make_address=SocketAddress)
    print(sockets.open(lambda *_: None).path, flush=True)
    await asyncio.to_thread(sys.stdin.read)

tempfile.tempdir = sys.argv[1]
asyncio.run(main())
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        yield Path(folder)


async def test_socket_files_of_a_killed_process_are_removed_those_of_a_living_one_are_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process that was killed used to leave a folder in /tmp for good, and so did every controller."""
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    listening = partial(PeerSockets, "127.0.0.1", (), node_id="n1", make_address=SocketAddress)
    with another_process(LISTENER, root) as (process, left):
        first: PeerSockets[SocketAddress] = listening()
        own = Path(first.open(lambda *_: None).path)
        assert left.is_socket(), "its owner lives"
        assert own.parent.stat().st_mode & 0o077 == 0
        process.kill()
        await asyncio.to_thread(process.wait, 30)
        assert folders(root) == {left.parent, own.parent}
        second: PeerSockets[SocketAddress] = listening()
        new = Path(second.open(lambda *_: None).path)
        assert folders(root) == {own.parent, new.parent}
    await first.close()
    await second.close()
    assert folders(root) == set()
    assert [path.name for path in root.iterdir()] == [f"kedge-ipc-{os.geteuid()}-lock"]
