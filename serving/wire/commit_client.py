"""Commits turns over a connection to the cluster controller.

A call of a Ray actor costs its two processes three milliseconds of CPU time together, more than all else that a short
turn costs the controller. So a replica sends its turns over a connection of its own. Whatever is not answered with
"the log holds it" goes to the actor: a commit may be sent any number of times, in any order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from controllers.records import SocketAddress, TurnRecord
from serving.wire.commit_messages import UnreadableCommit, decode_held, encode_records
from serving.wire.connections import Connection, ConnectionFactory
from serving.wire.link_keys import CurveKeys

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""How long an answer is waited for before the actor is asked."""
OPEN_TIMEOUT_S = 5.0
"""A connection that does not open in this time is given up."""
RECONNECT_PAUSE_S = 1.0
"""How long turns go to the actor after a connection could not be opened."""
SILENCE_PAUSE_S = 15.0
"""The same after an answer did not come in time. The log is slow, and must not get each turn by both ways."""

Admit = Callable[[bytes], Awaitable[SocketAddress | None]]
"""Asks the controller for its address (None: it takes no connections). The argument is the caller's public key."""


class CommitClient:
    """A connection to one controller. `admit` may take as long as the controller is away. Used on one event loop."""

    def __init__(self, admit: Admit, node_id: str) -> None:
        self._admit = admit
        self._keys = CurveKeys.new()
        self._connections = ConnectionFactory(node_id, self._keys)
        self._connection: Connection | None = None
        self._opened = asyncio.Event()
        self._failed = False
        """Whether the last try to open a connection failed, which is logged once."""
        self._connecting: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Sequence[bool]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether turns go over the connection now."""
        return self._opened.is_set()

    async def commit(self, records: Sequence[TurnRecord]) -> Sequence[bool]:
        """For each turn, whether the log holds it for certain. Never waits for a connection: while there is none, it
        begins to open one, and says False of all turns."""
        unknown = [False] * len(records)
        if self._connection is None:
            self._begin(self._connect)
        if self._connection is None or not self.is_open:
            return unknown
        number = next(self._numbers).to_bytes(8)
        answer: asyncio.Future[Sequence[bool]] = asyncio.get_running_loop().create_future()
        body = encode_records(records)
        self._waiting[number] = answer
        self._connection.send(number, body)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                held = await answer
                return held if len(held) == len(records) else unknown
        except TimeoutError:
            logger.warning("the cluster controller did not answer a commit in %g s", ANSWER_TIMEOUT_S)
            self._drop()
            self._begin(partial(asyncio.sleep, SILENCE_PAUSE_S))
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
        self._failed = False
        self._opened.set()

    def broke(self) -> None:
        """The controller has restarted or is out of reach: in either case it is asked again where it is."""
        self._drop()

    def _drop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self._opened.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_Broken())

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins to connect, or to pause, unless one of the two is under way."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(work())

    async def _connect(self) -> None:
        """Opens a connection. If that fails, waits for a while; turns go to the actor meanwhile."""
        try:
            address = await self._admit(self._keys.public)
            if address is not None:
                self._connection = self._connections.open(address, self)
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await self._opened.wait()
                return
        except Exception as error:
            if not self._failed:
                logger.warning("no connection to the cluster controller: %r", error)
            self._failed = True
        self._drop()
        await asyncio.sleep(RECONNECT_PAUSE_S)


class _Broken(Exception):
    """The connection broke before an answer came."""
