"""The cluster as the protocols see it (TurnService): finds a session's owner, pins the call there, and fails over.

The controller decides ownership; the front end only remembers it. A call is repeated under the same idempotency key: a
turn that was committed is answered, not run again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from controllers.errors import ControllerError, SessionNotFound, SessionTakenOver
from controllers.histogram import Measure
from controllers.records import TREE_KEY, ForkOrder, LedgerEntry, TurnNote
from controllers.session_keys import id_in, session_key
from controllers.session_log.kept_answers import CALL_KEY
from serving.background import BackgroundTasks
from serving.front.api.service import WatchedItem
from serving.front.cluster_watch import SharedWatch
from serving.front.known_places import KnownPlaces
from serving.front.replica_calls import ANY_REPLICA, ReplicaCalls
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.front.served_model import served_model
from serving.front.session_owners import RETRY_PAUSE_S, SessionOwners
from serving.front.shared_answer import SharedAnswer
from serving.front.siblings import Siblings
from serving.front.turn_dispatch import TurnDispatcher
from serving.front.watch_source import ClusterSource
from serving.watch.audit_reply import cluster_audit
from serving.watch.metrics import IngressMetrics
from serving.watch.page import cluster_page
from serving.wire.calls import (
    Abort,
    Audit,
    Describe,
    Detokenize,
    Drain,
    Flush,
    ForkSession,
    KeepNote,
    MetricsText,
    MoveSession,
    RewindSession,
    Tokenize,
)
from serving.wire.controller_calls import ControllerCalls, Told
from serving.wire.errors import told_to_clients, unavailable
from serving.wire.transcripts import transcript_of
from serving.wire.tree_ids import told_session
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    ForkedSession,
    ModelInfo,
    MovedSession,
    ServiceError,
    SessionInfo,
    TextPrompt,
    TokenizedPrompt,
    TurnCall,
    TurnEvent,
    TurnTranscript,
)

NEWCOMER_GRACE_S = 5.0
"""A replica registers with the controller a moment before this ingress knows it."""
REPLICAS_ASKED = 3
FIGURES_TIMEOUT_S = 3.0
"""For figures, the model and the health check: their callers wait at most some seconds for everything."""


class ClusterClient:
    """Implements TurnService (serving/front/api/service.py). One per ingress process; used on its event loop.

    A replica that has registered with the controller has `newcomer_grace_s` to become known here, too.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        replicas: ReplicaCalls,
        siblings: Siblings,
        controller: ControllerCalls,
        owners: SessionOwners,
        dispatcher: TurnDispatcher,
        places: KnownPlaces,
        metrics: IngressMetrics,
        settings: dict[str, Any],
        tasks: BackgroundTasks,
        replicas_expected: int = 1,
        newcomer_grace_s: float = NEWCOMER_GRACE_S,
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._siblings = siblings
        self._controller = controller
        self._owners = owners
        self._dispatcher = dispatcher
        self._places = places
        self._metrics = metrics
        self._settings = settings
        self._replicas_expected = replicas_expected
        self._newcomer_grace_s = newcomer_grace_s
        # Each asks every process, and clients may want it often: so it runs once at a time, for all who ask. The answer
        # is not kept: another ingress may have given newer figures, and counters must not go back.
        self._metrics_page = SharedAnswer(self._gather_metrics, tasks)
        self._health = SharedAnswer(lambda: replicas.any_answers(FIGURES_TIMEOUT_S), tasks)
        self._asked_model = SharedAnswer(self._ask_model, tasks)
        source = ClusterSource(
            replicas, controller, lambda entry, now_s: told_session(_session_info(entry, now_s))
        )
        self._watch = SharedWatch(source, tasks, lambda: self.model)

    @property
    def model(self) -> ModelInfo:
        return self._model

    async def learn_model(self) -> None:
        """An update may have replaced the replicas that answered before, or have added one since they were listed."""
        await self._asked_model.get()

    async def _ask_model(self) -> None:
        with suppress(ControllerError):  # the replicas that are known may have another model, too
            await self._replicas.learn()
        self._model = await served_model(self._replicas, FIGURES_TIMEOUT_S) or self._model

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        call = self._places.recognized(_with_session_key(call))
        async with self._dispatcher.dispatch(call) as events:
            yield events

    async def open_session(
        self,
        session_id: str | None,
        *,
        timeout_s: float | None,
        capacity_tokens: int | None,
        tenant: str,
        tree: bool = False,
    ) -> str:
        opened = await self._owners.open_session(session_id, tenant, timeout_s, capacity_tokens, tree=tree)
        return id_in(opened)

    async def is_tree(self, session_id: str, *, tenant: str) -> bool:
        with told_to_clients():
            owner = await self._owners.owner_of(session_key(tenant, session_id))
        return owner.open_key is not None and owner.open_key.startswith(TREE_KEY)

    async def fork_session(
        self,
        session_id: str,
        new_session_id: str | None,
        *,
        length: int | None,
        timeout_s: float | None,
        tenant: str,
    ) -> ForkedSession:
        child_id = new_session_id or uuid.uuid4().hex
        order = ForkOrder(session_key(tenant, child_id), uuid.uuid4().hex, length, timeout_s)
        key = session_key(tenant, session_id)
        answer = await self._owners.ask(key, lambda epoch: ForkSession(key, epoch, order))
        assert isinstance(answer, ForkedSession)
        return replace(answer, session_id=child_id)

    async def rewind_session(self, session_id: str, length: int, *, tenant: str) -> None:
        key, once = session_key(tenant, session_id), f"{CALL_KEY}{uuid.uuid4().hex}"
        await self._owners.ask(key, lambda epoch: RewindSession(key, epoch, length, once))

    async def move_session(self, session_id: str, to: str | None, *, tenant: str) -> MovedSession:
        key = session_key(tenant, session_id)
        self._owners.forget(key)  # the remembered owner may no longer own it
        with told_to_clients():
            before = await self._owners.once_log_answers(partial(self._owners.owner_of, key))
        answer = await self._owners.ask(key, lambda epoch: MoveSession(key, epoch, to, before.epoch))
        assert isinstance(answer, MovedSession)
        self._owners.forget(key)
        return replace(answer, from_id=before.replica_id)

    async def keep_note(
        self, session_id: str, note: bytes, *, expected_turn: int | None, tenant: str
    ) -> None:
        key, once = session_key(tenant, session_id), f"{CALL_KEY}{uuid.uuid4().hex}"
        await self._owners.ask(key, lambda epoch: KeepNote(key, epoch, note, once, expected_turn))

    async def close_session(self, session_id: str, *, tenant: str) -> bool:
        with told_to_clients():
            return await self._owners.close(session_key(tenant, session_id))

    async def abort(self, request_id: str | None, *, all_requests: bool = False, tenant: str) -> None:
        if not all_requests and request_id is None:
            return
        named = None if all_requests else request_id
        # First the ingresses: a turn that no replica has, or that is on its way to one, is known to its ingress only.
        self._dispatcher.abort(named, tenant)
        await self._siblings.ask("abort", named, tenant)
        await self._replicas.broadcast(Abort(named, tenant))

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, with_token_strs: bool) -> TokenizedPrompt:
        answer = await self._ask_any(Tokenize(prompt, prompt.add_special_tokens, with_token_strs))
        assert isinstance(answer, TokenizedPrompt)
        return answer

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(await self._ask_any(Detokenize(tuple(token_ids), skip_special_tokens)))

    async def flush(self) -> bool:
        answers = await self._replicas.broadcast(Flush())
        if not answers:
            raise ServiceError(unavailable("no replica answers"))
        return all(answers)

    async def drain_replica(self, replica_id: str) -> None:
        try:
            await self._replicas.call(replica_id, Drain())
        except ReplicaGone as error:
            if error.loss is Loss.UNKNOWN:
                message = f"There is no replica {replica_id!r}; /get_server_info lists them."
                raise ServiceError(ErrorInfo(404, "replica_not_found", message, "replica_id")) from error
            raise ServiceError(unavailable(f"replica {replica_id!r} does not answer")) from error

    async def sessions(self, *, tenant: str | None, after: str | None, limit: int) -> list[SessionInfo]:
        with told_to_clients():
            entries = await self._controller.sessions(tenant, after, limit)
        now_s = time.time()
        return [_session_info(entry, now_s) for entry in entries]

    async def session(self, session_id: str, *, tenant: str) -> SessionInfo | None:
        with told_to_clients():
            try:
                entry = await self._controller.session(session_key(tenant, session_id))
            except SessionNotFound:
                return None
        session = _session_info(entry, time.time())
        return session if (session.tenant, session.session_id) == (tenant, session_id) else None

    async def transcript(self, session_id: str, *, tenant: str) -> list[TurnTranscript]:
        with told_to_clients():
            try:
                notes = await self._notes(session_id, tenant)
            except (SessionNotFound, SessionTakenOver):
                # It may be another cluster's: this makes it ours. It is not done first, since it is a use of the
                # session: its idle clock would begin anew at each reading, though its owner's does not.
                await self._controller.resolve(session_id, False, tenant)
                notes = await self._notes(session_id, tenant)
        return await asyncio.to_thread(lambda: [transcript_of(note) for note in notes])

    async def _notes(self, session_id: str, tenant: str) -> list[TurnNote]:
        notes: list[TurnNote] = []
        after = None
        while page := await self._controller.notes(session_id, tenant, after):
            notes += page
            after = page[-1].turn_index
        return notes

    async def forget_note(self, session_id: str, turn_index: int, *, tenant: str) -> None:
        with told_to_clients():
            await self._controller.forget_note(session_id, tenant, turn_index)

    async def audit(self) -> dict[str, Any]:
        expected: set[str] = set()
        trouble = None
        try:
            expected = {status.replica_id for status in await self._controller.replicas()}
        except ControllerError as error:
            trouble = f"who should have answered is not known: {error.message}"
        names = expected.union(await self._replicas.present())
        answers = [each for each in await asyncio.gather(*map(self._audit_of, names)) if each is not None]
        for answer in answers:
            self._watch.audited(answer)
        return cluster_audit(answers, expected, trouble)

    def watch(
        self, interval_s: float, limit: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[WatchedItem]]]:
        return self._watch.watch(interval_s, limit)

    @property
    def is_watched(self) -> bool:
        return self._watch.is_reading

    def end_watching(self) -> None:
        """Ends all watches, because this ingress is about to stop: its watchers connect to another one."""
        self._watch.end()

    async def server_info(self) -> dict[str, Any]:
        return {
            "settings": self._settings,
            "replicas": await self._replicas.broadcast(Describe(), FIGURES_TIMEOUT_S),
            "ingresses": await self._siblings.ask("describe"),
        }

    async def metrics_text(self) -> str:
        return await self._metrics_page.get()

    async def healthy(self) -> bool:
        return await self._health.get()

    async def _ask_any(self, call: Tokenize | Detokenize) -> Any:
        """The answer of any replica. If the replica does not answer, another one is asked."""
        for _ in range(REPLICAS_ASKED):
            with suppress(ReplicaGone, ReplicaLate):
                return await self._replicas.call(ANY_REPLICA, call)
        raise ServiceError(unavailable("no replica answers"))

    async def _gather_metrics(self) -> str:
        replicas, ingresses, told = await asyncio.gather(
            self._replicas.broadcast(MetricsText(), FIGURES_TIMEOUT_S),
            self._siblings.ask("metrics_text"),
            self._controller_figures(),
        )
        return cluster_page(
            self._metrics,
            replicas,
            ingresses,
            told.joined,
            controller_up=not told.missing,
            present=len(await self._replicas.present()),
            expected=self._replicas_expected,
        )

    async def _audit_of(self, replica_id: str) -> dict[str, Any] | None:
        """The replica's audit; None if the replica does not answer, or is still unknown here, after the grace time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._newcomer_grace_s
        while True:
            try:
                answer: dict[str, Any] = await self._replicas.call(replica_id, Audit())
            except (ReplicaGone, ReplicaLate):
                if loop.time() + RETRY_PAUSE_S > deadline_s:
                    return None
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return answer

    async def _controller_figures(self) -> Told[list[Measure]]:
        """The measures of all shards that answer. If none does, that of the only one is missing."""
        try:
            return await self._controller.figures(FIGURES_TIMEOUT_S)
        except ControllerError:
            return Told([], missing=(0,))


def _with_session_key(call: TurnCall) -> TurnCall:
    session = call.session
    if session is None:
        return call
    return replace(call, session=replace(session, session_id=session_key(call.tenant, session.session_id)))


def _session_info(entry: LedgerEntry, now_s: float) -> SessionInfo:
    return SessionInfo(
        session_id=id_in(entry.session_id),
        replica_id=entry.replica_id,
        epoch=entry.epoch,
        tokens=entry.tokens,
        size_bytes=entry.size_bytes,
        turns=entry.turns,
        idle_s=0.0 if entry.in_turn else max(0.0, now_s - entry.last_used_s),
        in_turn=entry.in_turn,
        tenant=entry.tenant,
    )
