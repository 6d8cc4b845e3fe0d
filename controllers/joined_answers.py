"""Answers of several shards (controllers/shards.py) as one. The answers are in the order of the shards.

What is about sessions is added up, since each session is one shard's. What is about replicas is not: each shard tells
it of the same replicas. Measures stay apart, each with its shard as a label: a shard that starts again counts from
zero, and a sum would seem to have fallen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

from controllers.histogram import Measure
from controllers.records import ClusterEvent, ClusterView, LedgerEntry, ReplicaStatus

_BETWEEN = " "


def joined_page(pages: Sequence[Sequence[LedgerEntry]], limit: int | None) -> list[LedgerEntry]:
    """The first `limit` sessions (None: all) of the pages, each ordered by tenant and key."""
    return list(islice(heapq.merge(*pages, key=lambda entry: (entry.tenant, entry.session_id)), limit))


def joined_replicas(lists: Iterable[Sequence[ReplicaStatus]]) -> list[ReplicaStatus]:
    """Each replica as the first shard that lists it has it, with the sessions of all. It drains if it does so
    anywhere."""
    joined: dict[str, ReplicaStatus] = {}
    for status in chain.from_iterable(lists):
        first = joined.get(status.replica_id, replace(status, sessions=0))
        joined[status.replica_id] = replace(
            first,
            sessions=first.sessions + status.sessions,
            draining=first.draining or status.draining,
        )
    return list(joined.values())


def joined_measures(measures: Sequence[Sequence[Measure]]) -> list[Measure]:
    """All measures, with the label `shard` before their own: the number of the shard that tells them."""
    return [
        replace(measure, labels=(("shard", str(shard)), *measure.labels))
        for shard, told in enumerate(measures)
        for measure in told
    ]


def cursors_of(cursor: str | None, num_shards: int) -> Sequence[str | None]:
    """Each shard's cursor. A cursor of another number of shards counts as none."""
    parts = (cursor or "").split(_BETWEEN)
    return parts if cursor and len(parts) == num_shards else [None] * num_shards


def joined_view(views: Sequence[ClusterView], limit: int) -> ClusterView:
    """One view, with the `limit` sessions used last. Each shard has the same events of replicas: those of the first are
    told, as are its states."""
    first, *others = views
    if not others:
        return first
    recent = heapq.merge(*(view.recent for view in views), key=lambda entry: entry.last_used_s, reverse=True)
    events = chain(first.events, *map(_of_sessions, others))
    return ClusterView(
        sessions=sum(view.sessions for view in views),
        recent=tuple(islice(recent, limit)),
        states=dict(chain.from_iterable(view.states.items() for view in reversed(views))),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        cursor=_BETWEEN.join(view.cursor for view in views),
    )


def _of_sessions(view: ClusterView) -> Iterable[ClusterEvent]:
    return (event for event in view.events if event.session_id is not None)
