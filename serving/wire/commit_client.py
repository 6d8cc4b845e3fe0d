"""Commits turns over a connection to the cluster controller.

A call of a Ray actor costs its two processes three milliseconds of CPU time together, more than all else that a short
turn costs the controller. So a replica sends its turns over a connection of its own. Whatever is not answered with
"the log holds it" goes to the actor: a commit may be sent any number of times, in any order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from controllers.records import SocketAddress, TurnRecord
from serving.wire.commit_messages import UnreadableCommit, decode_held, encode_records
from serving.wire.connections import Connection, ConnectionFactory
from serving.wire.link_keys import CurveKeys

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""How long an answer is waited for before the actor is asked."""
RECONNECT_PAUSE_S = 1.0

Admit = Callable[[bytes], Awaitable[SocketAddress | None]]
"""Asks the controller for its address (None: it takes no connections). The argument is the caller's public key."""


class CommitClient:
    """A connection to one controller. `admit` may take as long as the controller is away. Used on one event loop."""

    def __init__(self, admit: Admit, node_id: str) -> None:
        self._admit = admit
        self._keys = CurveKeys.new()
        self._connections = ConnectionFactory(node_id, self._keys)
        self._connection: Connection | None = None
        self._open = False
        self._connecting: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Sequence[bool]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether turns go over the connection now."""
        return self._open

    async def commit(self, records: Sequence[TurnRecord]) -> Sequence[bool]:
        """For each turn, whether the log holds it for certain. Never waits for a connection: while there is none, it
        begins to open one, and says False of all turns."""
        unknown = [False] * len(records)
        if self._connection is None:
            self._begin_to_connect()
        if self._connection is None or not self._open:
            return unknown
        number = next(self._numbers).to_bytes(8)
        answer: asyncio.Future[Sequence[bool]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._connection.send(number, encode_records(records))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            logger.warning("the cluster controller did not answer a commit in %g s", ANSWER_TIMEOUT_S)
            self._drop()
            return unknown
        except _Broken:
            return unknown
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """To be called once nothing is committed any more."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop()
        self._connections.close()

    def frame_came(self, header: bytes, body: bytes) -> None:
        answer = self._waiting.get(header)
        if answer is None or answer.done():
            return
        try:
            answer.set_result(decode_held(body))
        except UnreadableCommit as error:
            logger.warning("the cluster controller's answer: %s", error)
            answer.set_exception(_Broken())

    def connected(self) -> None:
        self._open = True

    def broke(self) -> None:
        """The controller has restarted or is out of reach: in either case it is asked again where it is."""
        self._drop()

    def _drop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection, self._open = None, False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_Broken())

    def _begin_to_connect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        """Opens a connection, or waits for a while before the next try."""
        address = None
        try:
            address = await self._admit(self._keys.public)
        except Exception as error:  # turns go to the actor meanwhile
            logger.warning("no connection to the cluster controller: %r", error)
        if address is None:
            await asyncio.sleep(RECONNECT_PAUSE_S)
        else:
            self._connection = self._connections.open(address, self)


class _Broken(Exception):
    """The connection broke before an answer came."""
