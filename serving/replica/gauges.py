"""A replica's gauges that are not in its engine's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

from engine.api import Engine
from serving.watch.registry import Figure, ReadFigures


def replica_gauges(engine: Engine, sessions: Sized, unnamed: Sized, links: Callable[[], int]) -> ReadFigures:
    """Gauges of named sessions, unnamed sessions, connected front ends and the age of the engine's step."""

    def read() -> Iterator[Figure]:
        yield Figure("kedge_sessions_held", len(sessions))
        yield Figure("kedge_unnamed_sessions", len(unnamed))
        yield Figure("kedge_replica_links", links())
        yield Figure("kedge_engine_step_age_seconds", engine.step_age_s)

    return read
