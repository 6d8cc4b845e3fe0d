"""Faults put back into epochs, fences, idempotency and pending commits, in addition to those of mutations.py."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from msgspec import structs

import controllers.session_log.redis_store
import controllers.session_log.sqlite_store
import serving.front.turn_dispatch
import serving.replica.turn_runner
from controllers.cluster import Cluster
from controllers.records import LedgerEntry, TurnRecord
from controllers.session import SessionController
from serving.background import BackgroundTasks
from serving.front.turn_dispatch import TurnDispatcher
from serving.replica.session_host import SessionHost

Patches = list[Any]


def _moves_keep_the_epoch() -> Patches:
    """A session gets another owner at the same epoch."""

    def move_to(self: Cluster, entry: LedgerEntry, replica_id: str) -> None:
        self._store.assign(entry.session_id, replica_id, entry.epoch)
        moved = self._ledger.transfer(entry.session_id, replica_id)
        self._ledger._put(replace(moved, epoch=entry.epoch), moved)

    def changes_owner(entry: LedgerEntry, replica_id: str, _epoch: int) -> bool:
        return entry.replica_id != replica_id

    return [
        patch.object(Cluster, "_move_to", move_to),
        patch.object(controllers.session_log.sqlite_store, "changes_owner", changes_owner),
        patch.object(controllers.session_log.redis_store, "changes_owner", changes_owner),
    ]


def _replicas_compare_no_epochs() -> Patches:
    """A replica takes a turn of a session that it once held, without a check of the epoch."""

    def knows(self: SessionController, session_id: str, _epoch: int) -> bool:
        return session_id in self._sessions

    def at_epoch(self: SessionController, session_id: str, _epoch: int) -> Any:
        return self._get(session_id)

    return [
        patch.object(SessionController, "knows", knows),
        patch.object(SessionController, "_at_epoch", at_epoch),
    ]


def _stale_sessions_stay() -> Patches:
    """A replica keeps sessions after it learned that others own them."""

    def drop_stale(_self: SessionHost, _session_id: str, _epoch: int) -> None:
        return

    return [patch.object(SessionHost, "drop_stale", drop_stale)]


def _work_ends_with_its_caller() -> Patches:
    """A client that leaves cancels work that must outlive it: a commit in progress, which the log may already have."""

    async def outcome(_self: BackgroundTasks, task: asyncio.Task[Any]) -> Any:
        return await task

    return [patch.object(BackgroundTasks, "outcome", outcome)]


def _repetitions_are_new_turns() -> Patches:
    """A repeated commit is taken for the session's next turn."""

    def adds_turn(entry: LedgerEntry, record: TurnRecord, _is_last: Callable[[], bool]) -> bool:
        return record.epoch == entry.epoch

    real = controllers.session_log.sqlite_store.SqliteSessionStore.append_turns

    def append_turns(self: Any, records: Sequence[TurnRecord]) -> Any:
        outcomes: list[Any] = []
        for record in records:
            turns = self.find(record.session_id).turns
            key = f"{record.idempotency_key}-{turns}"
            outcomes += real(self, [replace(record, turn_index=turns, idempotency_key=key)])
        return outcomes

    return [
        patch.object(controllers.session_log.sqlite_store, "adds_turn", adds_turn),
        patch.object(controllers.session_log.sqlite_store.SqliteSessionStore, "append_turns", append_turns),
    ]


def _retries_have_keys_of_their_own() -> Patches:
    """An attempt that follows a lost one has another idempotency key."""
    real = TurnDispatcher._take_over

    async def take_over(self: TurnDispatcher, turn: Any, stack: AsyncExitStack) -> Any:
        session = turn.call.session
        if session is not None:
            turn.call = structs.replace(
                turn.call, session=structs.replace(session, idempotency_key=f"again-{uuid.uuid4().hex}")
            )
        return await real(self, turn, stack)

    return [patch.object(TurnDispatcher, "_take_over", take_over)]


def _calls_have_no_key() -> Patches:
    """An ingress repeats a call without a key if its client named none."""
    return [patch.object(serving.front.turn_dispatch, "_with_key", lambda call: call)]


def _takeovers_look_at_no_name() -> Patches:
    """A turn goes on in a later session of the same name, if the numbers of the turns agree."""
    return [
        patch.object(
            serving.replica.turn_runner,
            "_is_same",
            lambda turn, resumed: turn.turn_index == resumed.turn_index,
        )
    ]


EPOCH_MUTATIONS: MappingProxyType[str, Callable[[], Patches]] = MappingProxyType(
    {
        "a move keeps the epoch": _moves_keep_the_epoch,
        "a replica compares no epochs": _replicas_compare_no_epochs,
        "a replica keeps what others own": _stale_sessions_stay,
        "work under way ends with its client": _work_ends_with_its_caller,
        "a repeated commit is another turn": _repetitions_are_new_turns,
        "a takeover has another key": _retries_have_keys_of_their_own,
        "an ingress gives no key": _calls_have_no_key,
        "a takeover goes on in a later session of that name": _takeovers_look_at_no_name,
    }
)
