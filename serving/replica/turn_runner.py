"""Runs turns on one replica: begins and submits a turn, sends its events, then commits it whole or leaves no trace.

A turn may be cancelled at any moment, when its client goes away. A background task then cleans up, so that no history
stays lent out and no KV is left over. A turn that the engine has finished is committed even if its client leaves or
asks for an abort: the log may already have it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from controllers.errors import (
    ControllerError,
    IdempotencyConflict,
    SessionMoved,
    SessionNotFound,
    StaleEpoch,
    StoreError,
    TurnInFlight,
    TurnNotInFlight,
)
from controllers.records import TurnRecord
from controllers.session import SessionController
from controllers.session_keys import named
from controllers.turns import Replay, Turn
from engine.api import Engine, EngineError, EngineStopped, Finish, FinishReason, TokenConstraint, TokenDelta
from serving.background import BackgroundTasks
from serving.replica.drain import ReplicaDrain
from serving.replica.ending_turns import EndingTurns
from serving.replica.live_turn import NOTHING, Asker, EventMaker, LiveTurn, said_by
from serving.replica.mailbox import Mailbox
from serving.replica.overlaps import Overlaps, patience_s
from serving.replica.prompt_places import PlacedPrompt
from serving.replica.replay import decode_result, encode_result
from serving.replica.session_host import SessionHost
from serving.replica.tenant_load import TenantLoad
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_outcome import outcome_of
from serving.replica.turn_request import RequestBuilder
from serving.replica.unnamed_sessions import UnnamedSessions
from serving.trace.turn_traces import ReplicaTraces
from serving.watch.metrics import ReplicaMetrics
from serving.wire.errors import REPLICA_LOST, error_event, unavailable
from serving.wire.transcripts import encode_said
from serving.wire.turn_events import merge_events
from serving.wire.turns import ResumedTurn, ServiceError, SessionTurn, TurnCall, TurnEvent

logger = logging.getLogger(__name__)

Emit = Callable[[TurnEvent], None]

LOOK_UP_S = 2.0
ABORT_TIMEOUT_S = 30.0
OVERTAKEN = unavailable(
    "the replica was lost during the answer, and the session has gone on without this turn", REPLICA_LOST
)


class TurnRunner:
    """Runs turns. Used on the replica's event loop only. `clock` returns monotonic seconds, `unix_clock` Unix time."""

    def __init__(
        self,
        *,
        engine: Engine,
        sessions: SessionController,
        host: SessionHost,
        drain: ReplicaDrain,
        commits: TurnCommits,
        ending: EndingTurns,
        unnamed: UnnamedSessions,
        builder: RequestBuilder,
        event_maker: EventMaker,
        mailbox: Mailbox,
        load: TenantLoad,
        metrics: ReplicaMetrics,
        tasks: BackgroundTasks,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        traces: ReplicaTraces,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._host = host
        self._drain = drain
        self._commits = commits
        self._ending = ending
        self._unnamed = unnamed
        self._builder = builder
        self._event_maker = event_maker
        self._mailbox = mailbox
        self._load = load
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._unix_clock = unix_clock
        self._traces = traces
        self._numbers = itertools.count(1)
        self._live: dict[str, LiveTurn] = {}
        self._overlaps = Overlaps()

    async def run(self, call: TurnCall, epoch: int | None, tell: Emit) -> TurnEvent:
        """Runs a turn. Calls `tell` with its events as they come; returns the last one, which has a finish or an
        error."""
        with self._overlaps.client() as left, self._traces.turn(call, epoch) as trace:
            try:
                last = await self._run(call, epoch, Asker(tell, left, trace))
            except Exception:  # not one of the expected errors: a bug
                self._metrics.turn_ended("error")
                raise
            trace.ended(last)
            return last

    async def _run(self, call: TurnCall, epoch: int | None, asker: Asker) -> TurnEvent:
        try:
            begun = await self._begin(call, epoch, asker)
        except (EngineError, ControllerError, ServiceError) as error:
            self._metrics.turn_ended(outcome_of(error))
            return error_event(error)
        if isinstance(begun, Replay):
            self._metrics.turn_ended("replayed")
            return decode_result(begun.result)
        if call.tells_accepted:
            asker.tell(begun.accepted_event())
        try:
            await self._follow(begun)
            begun.trace.computed()
        except BaseException:
            leaving = self._leave(begun)
            asker.has_left()  # the session's next turn, if it is here already, waits for the task
            await self._tasks.outcome(leaving)
            raise
        ending = self._ending.start(begun.named, self._settle(begun))  # it goes on if the client leaves
        try:
            return await self._tasks.outcome(ending)
        except asyncio.CancelledError:
            self._ending.client_left(begun.named, ending)
            raise

    def abort(self, request_id: str | None, tenant: str) -> int:
        """Aborts the tenant's requests with this id (None: all of them), and returns how many. They end with reason
        "abort"."""
        chosen = [live.request_id for live in self._live.values() if live.call.named(request_id, tenant)]
        try:
            for engine_id in chosen:
                self._engine.abort(engine_id)
        except EngineStopped:
            logger.warning("abort: the engine has stopped, which ends every request")
        return len(chosen)

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def _begin(self, call: TurnCall, epoch: int | None, asker: Asker) -> LiveTurn | Replay:
        """Lends the history, builds the request and submits it. After an error nothing is changed."""
        started_s = self._clock()
        self._builder.check(call)
        constraint = await self._builder.constraint(call)
        if call.session is None:
            return await self._begin_unnamed(call, asker, started_s, constraint)
        if epoch is None:
            raise StaleEpoch("a session's turn needs the owner's epoch")
        session_id = call.session.session_id
        turn = await self._lend(call, call.session, epoch)
        if isinstance(turn, Replay):
            if not turn.result:
                raise IdempotencyConflict(
                    f"turn {turn.turn_index} of {named(session_id)} ran under this key, and its answer "
                    "was deleted since, by a rewind, by a turn that went back, or as a response"
                )
            return turn
        self._overlaps.has_turn(session_id, turn.idempotency_key, asker.left)
        try:
            await self._check_stays(call, call.session, turn)
            prompt = await self._builder.place(call, turn)
            if prompt.kept_len < turn.history_len:
                turn = self._sessions.cut_turn(turn, prompt.kept_len)
            return self._submit(call, turn, prompt, asker, started_s, constraint)
        except SessionMoved:
            await self._tasks.outcome(self._tasks.start(self._host.let_go(turn)))
            raise
        except BaseException:
            self._sessions.abort_turn(turn)
            self._tasks.start(self._host.turn_ended(session_id))
            raise

    async def _check_stays(self, call: TurnCall, session: SessionTurn, turn: Turn) -> None:
        """Raises an error if the turn belongs to another session of this name, if the session has gone on without the
        turn that is resumed, or if the session moves now (SessionMoved)."""
        if session.open_key not in (None, turn.open_key):
            raise SessionNotFound(f"{named(turn.session_id)} was closed, and another has its name")
        if call.resumed is None:
            await self._drain.offer(turn.session_id, turn.epoch)
        elif not _is_same(turn, call.resumed):
            raise ServiceError(OVERTAKEN)

    def _age_s(self, result: bytes) -> float:
        """How long ago the turn with this answer ended, by the clocks of both replicas; 0 if the answer was deleted."""
        ended_s = decode_result(result).ended_s if result else None
        return 0.0 if ended_s is None else self._unix_clock() - ended_s

    async def _begin_unnamed(
        self, call: TurnCall, asker: Asker, started_s: float, constraint: TokenConstraint | None
    ) -> LiveTurn:
        turn = self._unnamed.begin(call)
        try:
            prompt = await self._builder.place(call, turn)
            if turn is not None and prompt.kept_len < turn.history_len:
                turn = self._unnamed.cut(turn, prompt.kept_len)
            return self._submit(call, turn, prompt, asker, started_s, constraint)
        except BaseException:
            if turn is not None:
                self._unnamed.abort(turn)
            raise

    async def _lend(self, call: TurnCall, session: SessionTurn, epoch: int) -> Turn | Replay:
        """Begins the session's turn. Raises TurnInFlight if a turn is in flight and its client does not leave within
        `patience_s` (nor is answered, if it is a turn with the same key), or if a fork takes longer than that, and
        AdapterNotLoaded for a turn without an answer in the log.
        """
        digest, tools = await self._builder.digests(call)
        key = session.idempotency_key
        if session.retries and call.resumed is None:
            await self._host.hold(session.session_id, epoch)
            key = self._sessions.tried_key(session.session_id, epoch, digest, self._age_s) or key
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s(session)
        while True:
            await self._ending.over(session.session_id, key)
            await self._host.hold(session.session_id, epoch)
            try:
                return self._sessions.begin_turn(
                    session.session_id,
                    epoch,
                    idempotency_key=key,
                    digest=digest,
                    tools=tools,
                    cuttable=session.mode != "append",
                    expected_turn=session.expected_turn,
                    adapter=call.adapter,
                )
            except TurnInFlight:
                if await self._host.fork_ended(session.session_id, max(0.0, until_s - loop.time())):
                    continue
                if not await self._overlaps.over(session.session_id, key, until_s):
                    raise

    def _submit(
        self,
        call: TurnCall,
        turn: Turn | None,
        prompt: PlacedPrompt,
        asker: Asker,
        started_s: float,
        constraint: TokenConstraint | None,
    ) -> LiveTurn:
        engine_id = f"{call.request_id}#{next(self._numbers)}"
        built = self._builder.build(call, turn, prompt, engine_id, constraint, asker.trace.on_admitted)
        live = LiveTurn(
            call=call,
            request_id=engine_id,
            turn=turn,
            prompt=prompt,
            emit=asker.tell,
            output=built.output,
            started_s=started_s,
            in_thought=built.in_thought,
            resumed=call.resumed or NOTHING,
            submitted_s=self._clock(),
            last_token_s=None if call.resumed is None else started_s,
            trace=asker.trace,
        )
        self._mailbox.open(engine_id, partial(self._take, live))
        try:
            self._load.begin(engine_id, call.tenant, len(prompt.new_tokens))
            self._engine.submit(built.request)
        except EngineError:
            self._load.end(engine_id)
            self._mailbox.close(engine_id)
            raise
        self._live[engine_id] = live
        live.trace.submitted()
        return live

    def _take(self, live: LiveTurn, delta: TokenDelta) -> None:
        """If the delta cannot be taken, the turn fails, and the engine stops generating. Raises what went wrong."""
        is_first = not live.output_tokens
        try:
            self._event_maker.take(live, delta)
        except Exception:
            with suppress(EngineStopped):
                self._engine.abort(live.request_id)
            raise
        if is_first and live.output_tokens:
            self._load.computed(live.request_id)
            live.trace.computed_first()

    async def _follow(self, live: LiveTurn) -> None:
        """Waits until the engine has sent the final delta, or has ended."""
        while live.finish is None and self._engine.alive:
            await self._ended_within(live, LOOK_UP_S)
        if live.finish is None:
            error = EngineStopped("the engine stopped during the request")
            live.end(Finish(FinishReason.ERROR, error=error))

    async def _ended_within(self, live: LiveTurn, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await live.ended.wait()

    def _leave(self, live: LiveTurn) -> asyncio.Task[None]:
        """Starts the task that ends a turn whose client has left."""
        live.emit = _nobody_listens
        leaving = self._tasks.start(self._abandon(live))
        self._ending.client_left(live.named, leaving)
        return leaving

    async def _settle(self, live: LiveTurn) -> TurnEvent:
        """Ends a turn after its final delta; returns its last event."""
        assert live.finish is not None
        try:
            if live.finish.reason is FinishReason.ERROR:
                self._roll_back(live)
                assert live.finish.error is not None
                self._metrics.turn_ended(outcome_of(live.finish.error))
                return error_event(live.finish.error)
            if live.finish.reason is FinishReason.ABORT:
                self._roll_back(live)
                self._metrics.turn_ended("aborted")
                return live.final_event(self._unix_clock())
            return await self._commit(live)
        except Exception:  # a bug: the session goes on from the log
            with suppress(TurnNotInFlight):
                if live.named is not None:
                    await self._host.let_go(live.named)
            raise
        finally:
            await self._finish(live)

    async def _commit(self, live: LiveTurn) -> TurnEvent:
        final, turn, prompt = live.final_event(self._unix_clock()), live.named, live.prompt
        if turn is None and live.turn is not None:
            self._unnamed.commit(live.turn, prompt.new_tokens, live.output_tokens, prompt.checkpoint)
        if turn is not None:
            try:
                record = self._record(live, turn, merge_events([*live.events, final]))
            except ControllerError as error:
                self._metrics.turn_ended(outcome_of(error))
                await self._take_back(turn)
                return error_event(error)
            try:
                with live.trace.committing():
                    await self._commits.commit(record)
            except ControllerError as error:
                # Fenced, or given up: only the log knows the outcome. The next turn loads the session from there.
                logger.warning("session %s: turn not committed: %r", turn.session_id, error)
                self._metrics.turn_ended("store_failed" if isinstance(error, StoreError) else "stale")
                await self._host.let_go(turn)
                return error_event(error)
            self._sessions.commit_turn(turn, record)
        self._metrics.turn_ended("committed")
        return final

    def _record(self, live: LiveTurn, turn: Turn, whole_turn: TurnEvent) -> TurnRecord:
        """Raises CapacityExceeded."""
        return self._sessions.prepare_commit(
            turn,
            live.prompt.new_tokens,
            live.output_tokens,
            b"" if turn.idempotency_key is None else encode_result(whole_turn),
            live.prompt.checkpoint,
            whole=live.prompt.whole,
            note=encode_said(said_by(live, whole_turn)),
            opening_len=live.prompt.opening_len,
        )

    async def _abandon(self, live: LiveTurn) -> None:
        """Ends a turn whose client has left. It leaves no trace."""
        try:
            if live.finish is None:
                await self._abort_and_wait(live)
            completed = live.finish is not None and live.finish.reason in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            )
            if completed and live.named is not None:
                await self._take_back(live.named)
            else:
                self._roll_back(live)
            self._metrics.turn_ended("aborted")
        finally:
            await self._finish(live)

    async def _abort_and_wait(self, live: LiveTurn) -> None:
        deadline_s = self._clock() + ABORT_TIMEOUT_S
        try:
            self._engine.abort(live.request_id)
        except EngineStopped:
            return
        while live.finish is None and self._clock() < deadline_s and self._engine.alive:
            await self._ended_within(live, LOOK_UP_S)
        if live.finish is None:
            logger.error("request %s: the engine did not confirm the abort", live.request_id)

    async def _take_back(self, turn: Turn) -> None:
        """Undoes a turn that the engine has finished but that is not committed."""
        await self._host.cut_kv(turn.session_id, turn.history_len)
        self._sessions.abort_turn(turn)

    def _roll_back(self, live: LiveTurn) -> None:
        if live.named is not None:
            self._sessions.abort_turn(live.named)
        elif live.turn is not None:
            self._unnamed.abort(live.turn)

    async def _finish(self, live: LiveTurn) -> None:
        self._mailbox.close(live.request_id)
        self._load.end(live.request_id)
        self._live.pop(live.request_id, None)
        if live.named is not None:
            await self._host.turn_ended(live.named.session_id)


def _nobody_listens(_event: TurnEvent) -> None:
    pass


def _is_same(turn: Turn, resumed: ResumedTurn) -> bool:
    """Whether `turn` is the turn that was lost. The session may have moved past it, or another may have its name."""
    # None: a front end of an earlier version does not send the key.
    same_session = resumed.open_key in (None, turn.open_key)
    return same_session and resumed.turn_index == turn.turn_index
