"""An operator who runs `kedge drain` and `kedge sessions move`. A drain empties a replica; Serve then replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ray.exceptions import RayActorError, RayTaskError

from serving.wire.turns import ErrorInfo, MovedSession
from tests.simulation.calls import Call
from tests.simulation.logs import Records
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.truth import Truth

MOVE_REFUSALS = frozenset(
    {
        "turn_in_flight",
        "session_closing",
        "session_not_found",
        "invalid_move",
        "no_replica",
        "replica_unavailable",
        "controller_unavailable",
        "store_unavailable",
    }
)
REFUSALS = frozenset({"no_replica", "replica_not_found", "replica_unavailable", "controller_unavailable"})
LONGEST_ANSWER_S = 60.0
MOVE_TRIES = 10
MOVE_PAUSE_S = 0.05


class Operator:
    """A party that never fails. `drained` are the replicas whose drain was accepted. Each of them ends, unless it is
    the last replica and has sessions."""

    def __init__(self, cluster: Cluster, store: Records, truth: Truth) -> None:
        self.drained: list[Party] = []
        self._party = Party("operator", cluster.world)
        self._cluster = cluster
        self._store = store
        self._truth = truth
        self._moves: set[tuple[str, str | None]] = set()

    def drain(self, replica: Party) -> None:
        """Asks any ingress to drain the replica. Does nothing if there is no ingress."""
        if not self._cluster.serve.ingresses:
            return
        replica.asked_to_go = True
        call = Call(self._cluster.network, self._party, "web.drain", (replica.name,))
        call.send(self._cluster.random.choice(self._cluster.serve.ingresses))
        self._party.loop.create_task(self._hear(call, replica))

    def move(self, who: int, where: float) -> None:
        """Has a session moved: to a replica that lives, or below 0 to any other. Does nothing without sessions."""
        sessions, replicas = sorted(self._store.living), self._cluster.live_replicas
        if sessions and replicas:
            to = None if where < 0 else replicas[int(where * len(replicas)) % len(replicas)].name
            self._party.loop.create_task(self._move(sessions[who % len(sessions)], to))

    def asked_to_move(self, session_id: str, to: str) -> bool:
        """Whether a move of the session to this replica was asked for. It may happen at any time after that."""
        return not self._moves.isdisjoint({(session_id, to), (session_id, None)})

    async def _move(self, session_id: str, to: str | None) -> None:
        """Tries again while the session has a turn."""
        self._moves.add((session_id, to))
        for _ in range(MOVE_TRIES):
            if not self._cluster.serve.ingresses:
                return
            call = Call(self._cluster.network, self._party, "web.move", (session_id, to))
            call.send(self._cluster.random.choice(self._cluster.serve.ingresses))
            answer: MovedSession | ErrorInfo | None = None
            async with self._asking(f"move of {session_id} to {to}"):
                answer = await call
            if answer is None:
                return
            if isinstance(answer, MovedSession):
                if to not in (None, answer.replica_id):
                    self._truth.wrong(f"move of {session_id} to {to}: {answer}")
                return
            if answer.code not in MOVE_REFUSALS:
                self._truth.wrong(f"move of {session_id} to {to}: {answer}")
            if answer.code != "turn_in_flight":
                return
            await asyncio.sleep(MOVE_PAUSE_S)

    async def _hear(self, call: Call, replica: Party) -> None:
        async with self._asking(f"drain of {replica.name}"):
            refusal: ErrorInfo | None = await call
            if refusal is None:
                self.drained.append(replica)
                replica.goes_since_s = self._cluster.world.now_s
            elif refusal.code not in REFUSALS:
                self._truth.wrong(f"drain of {replica.name}: {refusal}")

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncIterator[None]:
        """Within it an answer is awaited. It ends without one if the ingress dies; anything else is wrong."""
        try:
            async with asyncio.timeout(LONGEST_ANSWER_S):
                yield
        except RayActorError:
            pass
        except (RayTaskError, TimeoutError) as error:
            self._truth.wrong(f"{what}: {error!r}")
