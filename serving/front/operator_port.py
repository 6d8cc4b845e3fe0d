"""A separate port for operators: their calls are accepted there and nowhere else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from serving.settings.strict_settings import SettingsError

STOP_TIMEOUT_S = 5


class OperatorPort:
    """Serves `app` at `address` (host, port) on the running event loop. All front ends of a machine share the port, and
    each connection goes to one of them. Raises SettingsError if it cannot listen there."""

    def __init__(self, app: ASGIApp, address: tuple[str, int]) -> None:
        host, port = address
        try:
            self._socket = socket.create_server(address, family=_family(host), reuse_port=True)
        except OSError as error:
            raise SettingsError(f"ingress.operator_port: cannot listen at {host}:{port}: {error}") from error
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=STOP_TIMEOUT_S)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self) -> None:
        """Stops serving. Calls in progress have STOP_TIMEOUT_S to end."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._socket.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process that this server runs in."""
        yield


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
