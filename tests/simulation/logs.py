"""The session log of a run, in SQLite or in Redis: how controllers open it, what it has taken, how it can be away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from controllers.redis_connection import connect_redis
from controllers.redis_store import RedisSessionStore
from controllers.settings import RedisLogSettings
from controllers.sqlite_store import SqliteSessionStore
from controllers.store import SessionStore
from controllers.tokens import unpack_tokens
from tests.simulation.blocking import BlockingLoop
from tests.simulation.loop import PartyLoop, World
from tests.simulation.network import Network, Party
from tests.simulation.records import Life, LogListener, RecordedStore
from tests.simulation.redis_link import RedisConnection, RedisHost
from tests.simulation.redis_model import RedisModel
from tests.simulation.redis_records import RedisRecords
from tests.simulation.truth import Truth

Mend = Callable[[], None]


class Records(Protocol):
    """What the log has taken: all sessions' lives, and those that are open. `listeners` are its owner's to add."""

    lives: list[Life]
    living: dict[str, Life]
    listeners: list[LogListener]


class Log(Protocol):
    """It outlives all who use it. Faults return what mends them."""

    records: Records
    controller_loop: type[PartyLoop]

    def open(self, controller: Party, cluster: str) -> SessionStore:
        """For a controller that starts. Raises StoreError."""

    def contents(self, session_id: str) -> tuple[tuple[int, ...], int]:
        """The tokens of an open session, and how many turns it has."""

    def stop(self) -> Mend: ...

    def freeze(self) -> Mend: ...

    def disconnect(self) -> None: ...


class SqliteLog:
    """In memory; one store for all controllers, as there is one file. To be frozen is to be away."""

    controller_loop: type[PartyLoop] = PartyLoop

    def __init__(self, world: World) -> None:
        self._controller: Party | None = None
        self._store = SqliteSessionStore(":memory:", clock=self._unix_s)
        self.records = RecordedStore(self._store, world.clock)

    def open(self, controller: Party, _cluster: str) -> SessionStore:
        self._controller = controller
        return self.records

    def _unix_s(self) -> float:
        """The log's times are its controller's."""
        assert self._controller is not None
        return self._controller.unix_s()

    def contents(self, session_id: str) -> tuple[tuple[int, ...], int]:
        record = self._store.load(session_id)
        return tuple(unpack_tokens(record.history)), record.turns

    def stop(self) -> Mend:
        self.records.away += 1

        def back() -> None:
            self.records.away -= 1

        return back

    freeze = stop

    def disconnect(self) -> None:
        self._store.disconnect()


class RedisLog:
    """Each controller has a store of its own, over connections that the network carries."""

    controller_loop: type[PartyLoop] = BlockingLoop

    def __init__(self, world: World, network: Network, truth: Truth) -> None:
        model = RedisModel(world.clock)
        self._settings = RedisLogSettings("redis://redis", "log")
        self.records = RedisRecords(model, self._settings.name, world.clock, truth.wrong)
        self._host = RedisHost(network, model, self.records.heard)

    def open(self, controller: Party, cluster: str) -> SessionStore:
        connect = partial(connect_redis, connection_class=RedisConnection, simulated=(self._host, controller))
        return RedisSessionStore(
            self._settings, cluster, clock=controller.unix_s, timer=controller.world.clock, connect=connect
        )

    def contents(self, session_id: str) -> tuple[tuple[int, ...], int]:
        return self.records.contents(session_id)

    def stop(self) -> Mend:
        return self._host.stop()

    def freeze(self) -> Mend:
        return self._host.freeze()

    def disconnect(self) -> None:
        pass
