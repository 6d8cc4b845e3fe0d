"""Faults put back into the product while it runs, to check that the simulation finds them.

Each mutation is an error that the code once had, or would have without one line of it. They concern fences, epochs,
idempotency keys, pending commits, and the identity of KV pages. `MUTATIONS` names them. `mutated(name)` keeps one in
place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from msgspec import structs

import controllers.session_log.sqlite_answers
import controllers.session_log.sqlite_store
from cache.history import History
from controllers.cluster import Cluster
from controllers.commits import Commits
from controllers.errors import StoreError
from controllers.held_session import HeldSession
from controllers.ownership import OwnershipLedger
from controllers.records import LedgerEntry, SessionRecord, StoredResult, TurnRecord
from controllers.session import SessionController
from controllers.session_log import log_rules
from controllers.turns import Turn
from serving.front.turn_progress import TurnProgress
from serving.replica.empty_turns import EmptyTurns
from serving.replica.ending_turns import EndingTurns
from serving.replica.session_host import SessionHost
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_runner import TurnRunner
from serving.wire.calls import RewindSession
from serving.wire.channel import Channel
from serving.wire.commit_messages import encode_held
from serving.wire.commit_server import CommitServer
from serving.wire.peer_sockets import Peer
from serving.wire.turns import ResumedTurn, TurnCall
from tests.simulation.detector_mutations import DETECTOR_MUTATIONS
from tests.simulation.epoch_mutations import EPOCH_MUTATIONS
from tests.simulation.planned_mutations import PLANNED_MUTATIONS

Patches = list[Any]

FREED_LATE_S = 20.0
TRUSTED_SLOTS = "a slot's KV is trusted (point 1)"


def _slots_are_trusted() -> Patches:
    """The engine frees the KV of a session that has left late, as when it is stalled. If the session comes back
    meanwhile, all of its old KV is used, whatever tokens it belongs to."""

    free = SessionHost._free_kv

    async def load(self: SessionHost, session_id: str, epoch: int) -> None:
        self._sessions.adopt(await self._controller.load_session(session_id, epoch, self._replica_id))

    async def free_late(self: SessionHost, session_id: str) -> None:
        await asyncio.sleep(FREED_LATE_S)
        if self._sessions.epoch(session_id) is None:
            await free(self, session_id)

    async def start(self: SessionHost, session_id: str) -> None:
        self._tasks.start(free_late(self, session_id))

    def begin_to_free(self: SessionHost, session_id: str) -> Coroutine[Any, Any, None]:
        return start(self, session_id)

    async def end_dropped(self: SessionHost, session_id: str, epoch: int) -> None:
        await free(self, session_id)
        await self._controller.close_session(session_id, None, epoch)

    return [
        patch.object(History, "agreed_len", lambda self, kv: min(self.length, len(kv))),
        patch.object(SessionHost, "_load", load),
        patch.object(SessionHost, "_free_kv", begin_to_free),
        patch.object(SessionHost, "_end_dropped", end_dropped),
    ]


def _commits_give_up() -> Patches:
    """The first error of a commit ends it, as before commits stayed pending."""

    async def commit(self: TurnCommits, record: TurnRecord) -> None:
        failure = await self._try(record)
        if failure is not None:
            raise StoreError("not committed")

    return [patch.object(TurnCommits, "commit", commit)]


def _commits_are_believed() -> Patches:
    """A commit that got no answer counts as made."""

    async def commit(self: TurnCommits, record: TurnRecord) -> None:
        await self._try(record)

    return [patch.object(TurnCommits, "commit", commit)]


def _ledger_fences_nothing() -> Patches:
    """Any committer is taken for the owner, and its turn for the next one."""

    def fence(self: OwnershipLedger, session_id: str, _epoch: int, _replica_id: str | None = None) -> Any:
        return self.get(session_id)

    real = controllers.session_log.sqlite_store.SqliteSessionStore.append_turns

    def append_turns(self: Any, records: Sequence[TurnRecord]) -> Any:
        return [outcome for record in records for outcome in real(self, [_next_turn(record, self.find)])]

    return [
        patch.object(OwnershipLedger, "fence", fence),
        patch.object(controllers.session_log.sqlite_store.SqliteSessionStore, "append_turns", append_turns),
        patch.object(Commits, "commit", _commit_anywhere(Commits.commit)),
    ]


def _commit_anywhere(real: Callable[..., Any]) -> Callable[..., Any]:
    def commit(self: Commits, records: Sequence[TurnRecord]) -> Any:
        return [
            outcome for record in records for outcome in real(self, [_next_turn(record, self._ledger.get)])
        ]

    return commit


def _next_turn(record: TurnRecord, find: Callable[[str], LedgerEntry]) -> TurnRecord:
    entry = find(record.session_id)
    return replace(record, epoch=entry.epoch, turn_index=entry.turns)


def _log_fences_nothing() -> Patches:
    """The log takes a turn of any epoch at any place, so a former owner overwrites later turns."""

    def adds_turn(entry: Any, record: TurnRecord, is_last: Callable[[], bool]) -> bool:
        if record.turn_index < entry.turns:
            return False  # taken for a repetition
        return log_rules.adds_turn(entry, replace(record, epoch=entry.epoch), is_last)

    def fence(self: OwnershipLedger, session_id: str, _epoch: int, _replica_id: str | None = None) -> Any:
        return self.get(session_id)

    return [
        patch.object(controllers.session_log.sqlite_store, "adds_turn", adds_turn),
        patch.object(OwnershipLedger, "fence", fence),
    ]


def _turns_overlap() -> Patches:
    """A session takes a turn while it has one."""
    real = HeldSession.check_free

    def check_free(self: HeldSession, turn_key: str | None = None) -> None:
        real(replace(self, turn=None), turn_key)

    return [patch.object(HeldSession, "check_free", check_free)]


def _keys_are_not_looked_up() -> Patches:
    """A turn with a known idempotency key runs again, and the log takes it."""
    real = SessionController.begin_turn

    def begin_turn(self: SessionController, session_id: str, epoch: int, **options: Any) -> Any:
        session = self._sessions.get(session_id)
        if session is not None:
            session.results.clear()
        return real(self, session_id, epoch, **options)

    return [
        patch.object(SessionController, "begin_turn", begin_turn),
        patch.object(controllers.session_log.sqlite_answers, "check_key", lambda *_: None),
    ]


def _keys_do_not_move() -> Patches:
    """The next owner does not get the answers of turns with a key."""
    real = SessionController._hold

    def hold(self: SessionController, record: SessionRecord, *rest: Any) -> None:
        real(self, replace(record, results=()), *rest)

    return [patch.object(SessionController, "_hold", hold)]


def _keys_are_remembered_before_the_log() -> Patches:
    """A turn's answer can be replayed as soon as its commit is prepared."""
    real = SessionController.prepare_commit

    def prepare(self: SessionController, turn: Turn, *rest: Any, **more: Any) -> TurnRecord:
        record = real(self, turn, *rest, **more)
        if record.idempotency_key is not None:
            stored = StoredResult(record.idempotency_key, record.turn_index, record.result, record.digest)
            results = OrderedDict(self._sessions[turn.session_id].results)
            results[record.idempotency_key] = stored
            self._sessions[turn.session_id].results = results
        return record

    async def over(_self: EndingTurns, _session_id: str, _key: str) -> None:
        return

    return [
        patch.object(SessionController, "prepare_commit", prepare),
        patch.object(EndingTurns, "over", over),
    ]


def _takeovers_tell_again() -> Patches:
    """After a takeover the client gets the turn again from its beginning."""
    real = TurnProgress.begin_again

    def begin_again(self: TurnProgress) -> ResumedTurn:
        resumed = real(self)
        self._again = {}
        return resumed

    return [patch.object(TurnProgress, "begin_again", begin_again)]


def _takeovers_go_on_anywhere() -> Patches:
    """A turn that goes on elsewhere does not check which of the session's turns it is."""
    real = TurnRunner._begin

    async def begin(self: TurnRunner, call: TurnCall, *rest: Any) -> Any:
        if call.resumed is not None and call.session is not None:
            entry = self._sessions._sessions.get(call.session.session_id)
            if entry is not None:
                call = structs.replace(call, resumed=structs.replace(call.resumed, turn_index=entry.turns))
        return await real(self, call, *rest)

    return [patch.object(TurnRunner, "_begin", begin)]


def _channels_go_on_anywhere() -> Patches:
    """A channel does not resend what a broken connection lost. It goes on with the next message."""
    real = Channel._message

    def message(self: Channel, number: int, body: bytes) -> bytes | None:
        self._received = max(self._received, number)
        return real(self, number, body)

    return [patch.object(Channel, "_message", message), patch.object(Channel, "_resend", lambda _self: None)]


def _channels_tell_again() -> Patches:
    """A channel resends everything, and the other end takes it again, whether it had arrived or not."""
    real = Channel._message

    def message(self: Channel, number: int, body: bytes) -> bytes | None:
        return body if number < self._received else real(self, number, body)

    return [
        patch.object(Channel, "_message", message),
        patch.object(Channel, "_acknowledged", lambda *_: None),
    ]


def _abandoned_turns_stay() -> Patches:
    """When a client leaves, its turn stays in flight."""
    return [
        patch.object(TurnRunner, "_roll_back", lambda *_: None),
    ]


def _rewinds_are_told_early() -> Patches:
    """A rewind is told as done before the log has it."""

    async def rewind(self: EmptyTurns, call: RewindSession) -> None:
        self._host._tasks.start(self._run(call, rewind_to=call.length))

    return [patch.object(EmptyTurns, "rewind", rewind)]


def _connections_say_held() -> Patches:
    """Over its connection the controller says of all turns that the log holds them, also of those that it refused."""

    async def answer(self: CommitServer, peer: Peer, header: bytes, records: Sequence[TurnRecord]) -> None:
        await self._commit(records)
        self._sockets.send(peer, header, encode_held([True] * len(records)))

    return [patch.object(CommitServer, "_answer", answer)]


def _epochs_begin_anew() -> Patches:
    """A session that is opened under the name of a closed one begins at the first epoch."""
    return [patch.object(controllers.session_log.sqlite_store, "_epoch_floor", lambda _: 0)]


def _closes_that_wait_are_not_in_the_log() -> Patches:
    """Only the replica knows that a session is to be closed when its turn has ended."""
    return [patch.object(Cluster, "close_after", lambda *_: None)]


MUTATIONS: MappingProxyType[str, Callable[[], Patches]] = MappingProxyType(
    {
        TRUSTED_SLOTS: _slots_are_trusted,
        "a commit gives up at its first error (point 2)": _commits_give_up,
        "a commit without an answer counts as made": _commits_are_believed,
        "nobody looks at who commits": _ledger_fences_nothing,
        "a refused commit is told as held over the connection": _connections_say_held,
        "the log takes an old turn for a repetition": _log_fences_nothing,
        "turns of a session overlap": _turns_overlap,
        "rewinds are told before the log has them": _rewinds_are_told_early,
        "keys are not looked up": _keys_are_not_looked_up,
        "keys do not move with a session": _keys_do_not_move,
        "keys are remembered before the log has them": _keys_are_remembered_before_the_log,
        "a takeover tells again": _takeovers_tell_again,
        "a takeover goes on in another turn": _takeovers_go_on_anywhere,
        "a channel goes on anywhere": _channels_go_on_anywhere,
        "a channel tells again": _channels_tell_again,
        "abandoned turns stay in flight": _abandoned_turns_stay,
        "epochs begin anew": _epochs_begin_anew,
        "a close that waits is not in the log": _closes_that_wait_are_not_in_the_log,
        **EPOCH_MUTATIONS,
        **PLANNED_MUTATIONS,
        **DETECTOR_MUTATIONS,
    }
)


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for each in MUTATIONS[name]():
            stack.enter_context(each)
        yield
