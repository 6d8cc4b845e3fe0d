"""Connections to a process that listens (`peer_sockets.py`), over ZeroMQ: over a socket file on one node, encrypted
between nodes."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from controllers.records import SocketAddress
from serving.wire.link_keys import CurveKeys
from serving.wire.loop_socket import LoopSocket

RECONNECT_MS = 20
LONGEST_RECONNECT_MS = 500


class Connection(Protocol):
    """A connection to one process, which reopens automatically. Frames keep their order while it does not break."""

    def send(self, header: bytes, body: bytes) -> None: ...

    def renew(self) -> None:
        """Replaces a silent connection by a new one."""

    def close(self) -> None: ...


class ConnectionEvents(Protocol):
    """What the owner of a connection is told, on the event loop."""

    def frame_came(self, header: bytes, body: bytes) -> None: ...

    def connected(self) -> None: ...

    def broke(self) -> None: ...


class ConnectionFactory:
    """Opens connections for a process on node `node_id`. `keys` are its own. Used on one event loop."""

    def __init__(self, node_id: str, keys: CurveKeys) -> None:
        self._node_id = node_id
        self._keys = keys
        self._context = zmq.Context()

    def open(self, address: SocketAddress, events: ConnectionEvents) -> Connection:
        if address.node_id == self._node_id:
            return ZmqConnection(self._context, f"ipc://{address.path}", events, keys=None, server=b"")
        return ZmqConnection(
            self._context, address.url, events, keys=self._keys, server=address.public_key.encode()
        )

    def close(self) -> None:
        """To be called once all of its connections are closed."""
        self._context.destroy(linger=0)


class ZmqConnection:
    """Implements Connection. ZeroMQ reconnects by itself; `events` is told of each connection and of its end."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        url: str,
        events: ConnectionEvents,
        *,
        keys: CurveKeys | None,
        server: bytes,
    ) -> None:
        self._context = context
        self._url = url
        self._events = events
        self._keys = keys
        self._server = server
        self._name = uuid.uuid4().bytes
        self._open()

    def send(self, header: bytes, body: bytes) -> None:
        with suppress(zmq.ZMQError):  # a frame that is lost is sent again
            self._socket.send((header, body))

    def renew(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        if self._socket.closed:
            return
        self._raw.disable_monitor()
        self._monitor.close(linger_ms=0)
        self._socket.close(linger_ms=0)

    def _open(self) -> None:
        socket = self._raw = self._context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, b"\x01" + self._name)  # ids that begin with a zero byte are ZeroMQ's own
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
        socket.set_hwm(0)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        if self._keys is not None:
            socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.set(zmq.CURVE_SERVERKEY, self._server)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = LoopSocket(monitor, self._watch)
        self._socket = LoopSocket(socket, self._take)
        socket.connect(self._url)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._events.frame_came(*frames)

    def _watch(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._events.connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self._events.broke()
