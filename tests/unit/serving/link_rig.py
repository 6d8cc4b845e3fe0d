"""A front end's calls and the replica's end of them in one process, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

from controllers.records import ReplicaAddress, ReplicaStatus
from serving.background import BackgroundTasks
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_link import LinkTimes
from serving.replica.link_server import Emit, LinkServer
from serving.wire.calls import AnyCall
from serving.wire.connections import ConnectionFactory
from serving.wire.link_keys import CurveKeys
from serving.wire.peer_sockets import PeerSockets

SECRET = b"s" * 32
NODE = "n1"
ELSEWHERE = "n2"
TIMES = LinkTimes(sign_of_life_s=0.1, silence_s=20.0, reopen_s=5.0)

Serve = Callable[[AnyCall, Emit], Coroutine[Any, Any, None]]


class LinkRig:
    """Replica "r" answers calls with `serve`. `listed` is what the controller says, `died` what Ray says of its
    process. A front end on another node uses TCP."""

    def __init__(
        self,
        serve: Serve,
        *,
        node: str = NODE,
        secret: bytes = SECRET,
        times: LinkTimes = TIMES,
        call_timeout_s: float = 20.0,
    ) -> None:
        self.tasks = BackgroundTasks()
        self.died = False
        self.broken = 0
        self.gone: list[str] = []
        self.sockets = PeerSockets(
            "127.0.0.1",
            (CurveKeys.of_secret(SECRET).public,),
            node_id=NODE,
            make_address=partial(ReplicaAddress, actor="r", namespace="serve"),
        )
        self.server = LinkServer(self.sockets, serve, self.tasks)
        self.address = self.sockets.open(self.server.frame_came)
        self.listed = [ReplicaStatus("r", 100, 100, address=self.address)]
        self.connections = ConnectionFactory(node, CurveKeys.of_secret(secret))
        controller: Any = self
        self.calls = ReplicaCalls(
            controller,
            self.connections.open,
            self.has_died,
            self.tasks,
            Random(1),
            times=times,
            call_timeout_s=call_timeout_s,
            on_broken=self._broke,
            on_gone=self.gone.append,
        )

    async def replicas(self, _must_know: bool = False) -> list[ReplicaStatus]:
        return self.listed

    async def has_died(self, _address: ReplicaAddress) -> bool:
        return self.died

    def _broke(self) -> None:
        self.broken += 1

    async def close(self) -> None:
        self.calls.stop()
        await self.tasks.stop(0.1)
        await self.sockets.close()
        self.connections.close()


@asynccontextmanager
async def running_link(serve: Serve, **options: Any) -> AsyncIterator[LinkRig]:
    rig = LinkRig(serve, **options)
    try:
        yield rig
    finally:
        await asyncio.wait_for(rig.close(), 10.0)
