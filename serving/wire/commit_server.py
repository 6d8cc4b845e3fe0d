"""The cluster controller's end of the connections over which replicas commit turns. It is in the controller's
process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import ray

from controllers.commit_groups import Write
from controllers.records import SocketAddress, TurnRecord
from serving.background import BackgroundTasks
from serving.wire.commit_messages import UnreadableCommit, decode_records, encode_held
from serving.wire.peer_sockets import Peer, PeerSockets

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0


class CommitServer:
    """Commits the groups that replicas send, and answers which turns the log holds. Why it does not hold a turn, the
    replica learns from the actor. Used on the controller's event loop."""

    def __init__(self, commit: Write, host: str, node_id: str) -> None:
        self._commit = commit
        self._known: set[bytes] = set()
        self._tasks = BackgroundTasks()
        self._sockets = PeerSockets(host, self._known, node_id=node_id, make_address=SocketAddress)
        self._address: SocketAddress | None = None

    def admit(self, key: bytes) -> SocketAddress:
        """Where a replica with this public key may connect. Raises zmq.ZMQError if a socket cannot be bound."""
        self._known.add(key)
        if self._address is None:
            self._address = self._sockets.open(self._frame_came)
        return self._address

    async def close(self) -> None:
        await self._tasks.stop(STOP_TIMEOUT_S)
        if self._address is not None:
            await self._sockets.close()

    def _frame_came(self, peer: Peer, header: bytes, body: bytes) -> None:
        try:
            records = decode_records(body)
        except UnreadableCommit as error:
            logger.warning("turns of another version: %s", error)
            self._sockets.send(peer, header, b"")  # no answer either: the replica asks the actor
            return
        self._tasks.start(self._answer(peer, header, records))

    async def _answer(self, peer: Peer, header: bytes, records: Sequence[TurnRecord]) -> None:
        try:
            held = [outcome is None for outcome in await self._commit(records)]
        except Exception:  # the actor tells the replica
            logger.exception("%d turns were not committed", len(records))
            held = [False] * len(records)
        self._sockets.send(peer, header, encode_held(held))


def serve_commits(commit: Write) -> CommitServer:
    """The server of the controller whose actor this process is."""
    return CommitServer(commit, ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())
