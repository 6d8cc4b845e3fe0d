"""A Redis as a party of its own, and redis-py's own connections to it, over a socket that the network carries."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from redis.connection import Connection

from tests.simulation.blocking import BlockingLoop
from tests.simulation.network import Network, Party
from tests.simulation.redis_model import OK, RedisModel, ReplyError, Words
from tests.simulation.redis_wire import packed, parse_requests

Heard = Callable[[tuple[bytes, ...], Party], None]


class RedisHost:
    """A running Redis. `heard` gets the keys that a client's command wrote, and the client's party."""

    def __init__(self, network: Network, model: RedisModel, heard: Heard) -> None:
        self.network = network
        self.model = model
        self._heard = heard
        self._stops = 0
        self.start()

    def start(self) -> None:
        self.party = Party("redis", self.network.world)

    def stop(self) -> Callable[[], None]:
        """Kills the Redis. Returns what starts it again with all data that it had taken."""
        self._stops += 1
        self.party.die()

        def start() -> None:
            self._stops -= 1
            if not self._stops:
                self.model.restart()
                self.start()

        return start

    def freeze(self) -> Callable[[], None]:
        self.party.loop.freeze()
        return self.party.loop.thaw

    def run(self, words: Words, client: Party) -> Any:
        try:
            return self.model.execute(words)
        except ReplyError as error:
            return error
        finally:
            if written := tuple(self.model.written):
                self.model.written.clear()
                self._heard(written, client)


class Session:
    """A Redis's state for one connection: the commands of a transaction that is being sent."""

    def __init__(self, host: RedisHost, client: Party) -> None:
        self._host = host
        self._client = client
        self._queued: list[Words] | None = None
        self._unfinished = b""

    def serve(self, data: bytes) -> bytes:
        requests, self._unfinished = parse_requests(self._unfinished + data)
        return b"".join(packed(self._reply(words)) for words in requests)

    def _reply(self, words: Words) -> Any:
        match words[0].upper():
            case b"MULTI":
                self._queued = []
                return OK
            case b"EXEC" if self._queued is not None:
                queued, self._queued = self._queued, None
                return [self._host.run(each, self._client) for each in queued]
        if self._queued is not None:
            self._queued.append(words)
            return QUEUED
        return self._host.run(words, self._client)


QUEUED = type(OK)(b"QUEUED")


class RedisSocket:
    """The client's end. A client that waits for data blocks its party, whose loop must be a BlockingLoop."""

    def __init__(self, host: RedisHost, client: Party, timeout_s: float) -> None:
        assert isinstance(client.loop, BlockingLoop)
        self._loop = client.loop
        self._host = host
        self._client = client
        self._timeout_s = timeout_s
        self._session = Session(host, client)
        self._server: Party | None = None
        self._arrived = b""
        self._broken: OSError | None = None
        self._told_s = self._answered_s = 0.0

    def connect(self) -> None:
        self._loop.block(self._host.network.delay_s())
        if self._host.party.dead:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._server = self._host.party
        self._server.calls[self] = None

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        if self._broken is not None:
            raise self._broken
        server = self._server
        assert server is not None

        def serve() -> None:
            answer = self._session.serve(bytes(data))
            if not answer:
                return
            self._answered_s = self._host.network.carry(
                server, self._client, lambda: self._arrive(answer), self._break, not_before_s=self._answered_s
            )

        self._told_s = self._host.network.send(
            self._client, server, serve, self._break, not_before_s=self._told_s
        )

    def recv(self, size: int) -> bytes:
        if not self._arrived and self._broken is None:
            if not self._timeout_s:
                raise BlockingIOError(errno.EWOULDBLOCK, "nothing has arrived")
            self._loop.block(self._timeout_s)
        data, self._arrived = self._arrived[:size], self._arrived[size:]
        if data:
            return data
        raise self._broken or TimeoutError("timed out")

    def shutdown(self, _how: int) -> None:
        pass

    def close(self) -> None:
        if self._server is not None:
            self._server.calls.pop(self, None)

    def getsockname(self) -> tuple[str, int]:
        return self._client.name, 0

    getpeername = getsockname

    # The methods of an OpenCall, for the server's party.

    def party_died(self, _server: Party) -> None:
        self._client.world.after(self._host.network.delay_s(), self._break)

    def is_answered_there(self, _party: Party) -> bool:
        return False

    def _arrive(self, data: bytes) -> None:
        self._arrived += data
        self._loop.unblock()

    def _break(self) -> None:
        self._broken = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self._loop.unblock()


class RedisConnection(Connection):
    """A connection of redis-py with a simulated socket."""

    def __init__(self, simulated: tuple[RedisHost, Party], **options: Any) -> None:
        self._host_and_client = simulated
        super().__init__(**options)

    def _connect(self) -> RedisSocket:
        connecting = RedisSocket(*self._host_and_client, timeout_s=self.socket_connect_timeout)
        connecting.connect()
        connecting.settimeout(self.socket_timeout)
        return connecting
