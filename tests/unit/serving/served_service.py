"""The real service behind a real socket, on a thread of its own. It is for clients that block, such as schemathesis."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, http_server, local_service

REPLY_PATIENCE_S = 60.0
"""A call that takes longer hangs, even on a busy machine."""

T = TypeVar("T")


class ServedService:
    """`address` is where the service listens. All other parts live on the service's thread; `run` runs a coroutine
    there."""

    def __init__(self, address: str, service: LocalService, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.service = service
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(REPLY_PATIENCE_S)

    def raw_call(self, request: bytes) -> bytes:
        """Sends `request` and returns all bytes until the connection ends."""
        host, port = self.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), REPLY_PATIENCE_S) as connection:
            connection.sendall(request)
            pieces = []
            while piece := connection.recv(65_536):
                pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def served_service(directory: Path, **options: Any) -> Iterator[ServedService]:
    """Runs the service for the time of a test. `options` go to the application."""
    came_up: list[ServedService] = []
    up, ending = threading.Event(), threading.Event()

    async def serve() -> None:
        async with (
            local_service(directory) as service,
            http_server(create_http_app(service, **options)) as address,
        ):
            came_up.append(ServedService(address, service, asyncio.get_running_loop()))
            up.set()
            await asyncio.to_thread(ending.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert up.wait(REPLY_PATIENCE_S)
        yield came_up[0]
    finally:
        ending.set()
        thread.join(REPLY_PATIENCE_S)
        assert not thread.is_alive()
