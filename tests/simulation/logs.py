"""The session log of a run, in SQLite or in Redis: how controllers open it, what it has taken, and its outages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from controllers.session_log.redis_connection import connect_redis
from controllers.session_log.redis_store import RedisSessionStore
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.settings import RedisLogSettings
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
    """What the log has taken: the lives of all sessions, and of those that are open. The owner adds `listeners`."""

    lives: list[Life]
    living: dict[str, Life]
    listeners: list[LogListener]


class Log(Protocol):
    """The session log. It outlives everybody who uses it. Methods that cause a fault return what mends it."""

    records: Records
    controller_loop: type[PartyLoop]

    def open(self, controller: Party, cluster: str) -> SessionStore:
        """Opens the log for a controller that starts. Raises StoreError."""

    def contents(self, session_id: str) -> tuple[tuple[int, ...], int]:
        """The tokens of an open session and the number of its turns."""

    def stop(self) -> Mend: ...

    def freeze(self) -> Mend: ...

    def disconnect(self) -> None: ...


class SqliteLog:
    """A log in memory. All controllers share one store, because there is one file. A frozen log is an absent one."""

    controller_loop: type[PartyLoop] = PartyLoop

    def __init__(self, world: World) -> None:
        self._controller: Party | None = None
        self._store = SqliteSessionStore(":memory:", clock=self._unix_s)
        self.records = RecordedStore(self._store, world.clock)

    def open(self, controller: Party, _cluster: str) -> SessionStore:
        self._controller = controller
        return self.records

    def _unix_s(self) -> float:
        """The time in the log is the time of its controller."""
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
    """A log in Redis. Each controller has a store of its own, over connections that the network carries."""

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
