"""Sockets that a process listens on: an IPC socket for processes on its node, a TCP socket for all others."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from controllers.records import SocketAddress
from engine.owned_folder import OwnedFolder
from serving.wire.link_keys import CurveKeys
from serving.wire.loop_socket import LoopSocket

LINGER_MS = 1000
"""How long `close` waits for the last answers to be sent."""

SUFFIX = ".ipc"


Peer = tuple[int, bytes]
"""A peer's connection: the index of the socket it uses, and its name there."""

TakeFrame = Callable[[Peer, bytes, bytes], None]
"""Takes a frame (header and body) that a peer has sent."""

Context = zmq.Context[zmq.Socket[bytes]]

A = TypeVar("A", bound=SocketAddress)


class PeerSockets(Generic[A]):
    """Used on one event loop. Call `open` first and `close` last.

    `known` are the public keys of peers. A peer with another key cannot connect over TCP. The owner may add keys later.
    `make_address` makes the address that peers are told, of node id, path, URL and public key.
    """

    def __init__(
        self,
        host: str,
        known: Collection[bytes],
        *,
        node_id: str,
        make_address: Callable[[str, str, str, str], A],
    ) -> None:
        self._host = host
        self._node_id = node_id
        self._known = known
        self._make_address = make_address
        self._context: Context | None = None  # one for each try: an address within it is free only later
        self._keys = CurveKeys.new()
        self._folder: OwnedFolder | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._sockets: list[LoopSocket] = []

    def open(self, frame_came: TakeFrame) -> A:
        """Begins to listen. Raises zmq.ZMQError and OSError. Then nothing stays open, and it may be tried again."""
        try:
            return self._listen(frame_came)
        except BaseException:
            self._discard(linger_ms=0).term()
            raise

    def _listen(self, frame_came: TakeFrame) -> A:
        context = self._context = zmq.Context()
        self._folder = own_folder(Path(tempfile.gettempdir()))
        path = self._folder.file("calls")
        local = self._router(context, frame_came)
        local.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        remote = self._router(context, frame_came)
        self._authenticate(context, remote)
        port = remote.bind_to_random_port(f"tcp://{self._host}")
        return self._make_address(
            self._node_id, str(path), f"tcp://{self._host}:{port}", self._keys.public.decode()
        )

    def send(self, peer: Peer, header: bytes, body: bytes) -> bool:
        """False if the peer is not connected now. It may connect again."""
        index, name = peer
        if not self._sockets:  # closed
            return False
        try:
            self._sockets[index].send((name, header, body))
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    async def close(self) -> None:
        if self._context is not None:
            await asyncio.to_thread(self._discard(LINGER_MS).term)

    def _discard(self, linger_ms: int) -> Context:
        """Closes all sockets. Returns their context, which is to be terminated."""
        assert self._context is not None
        for socket in self._sockets:
            socket.close(linger_ms)
        self._sockets.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        context, self._context = self._context, None
        return context

    def _router(self, context: Context, frame_came: TakeFrame) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again keeps its name
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set_hwm(0)  # a socket's queue has no limit: the links have one
        socket.set(zmq.TCP_KEEPALIVE, 1)  # else a peer whose machine is lost keeps its connection for ever
        self._sockets.append(LoopSocket(socket, partial(_take, len(self._sockets), frame_came)))
        return socket

    def _authenticate(self, context: Context, socket: zmq.Socket[bytes]) -> None:
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=KnownKeys(self._known))
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)


def own_folder(root: Path) -> OwnedFolder:
    """A folder for this process's socket files, which only its user can enter. Clears away those of this user's dead
    processes. Raises OSError. The user is in the name because users may share `root`, and the lock of such folders in
    it is the user's own."""
    return OwnedFolder(root, f"kedge-ipc-{os.geteuid()}-", SUFFIX)


class KnownKeys:
    """A credentials provider for AsyncioAuthenticator that accepts some public keys."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


def _take(index: int, frame_came: TakeFrame, frames: list[bytes]) -> None:
    if len(frames) == 3:
        name, header, body = frames
        frame_came((index, name), header, body)
