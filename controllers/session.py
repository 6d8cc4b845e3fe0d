"""SessionController: turns of the sessions that one replica owns. Pure logic; one owner, the replica's event loop.

A turn commits whole or leaves no trace: `begin_turn` only lends the history out. History changes only in `commit_turn`;
a rewind also takes effect there. A fork takes the place of a turn in its parent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from controllers.deadlines import Deadlines
from controllers.errors import (
    SessionNotFound,
    StaleEpoch,
    TurnDiffers,
    TurnInFlight,
    TurnNotInFlight,
)
from controllers.held_session import HeldSession
from controllers.history_chain import ChainMaker, HistoryChain
from controllers.records import (
    COUNTED_KEY,
    Checkpoint,
    SessionRecord,
    SessionStatus,
    TurnRecord,
)
from controllers.retention import idle_timeout_s
from controllers.served_model import ServedModel
from controllers.session_keys import named
from controllers.session_log.log_rules import check_fork
from controllers.tokens import encode_tokens, unpack_tokens
from controllers.turns import Fork, Replay, Turn

TRIED_AGAIN_WITHIN_S = 60.0
"""A retry comes within this time. OpenAI's SDKs wait for at most 8 s, or as long as `retry-after` says, up to a
minute."""


class SessionController:
    """Begins, commits and aborts turns, and keeps idle clocks. `clock` returns seconds and never goes back.

    `model` is the model that runs the turns. Without it any history is adopted, as in tests and for unnamed sessions.
    `make_chain` makes the chains that hold histories.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        default_timeout_s: float,
        model: ServedModel | None = None,
        *,
        make_chain: ChainMaker,
    ) -> None:
        self._clock = clock
        self._default_timeout_s = default_timeout_s
        self._model = model
        self._make_chain = make_chain
        self._sessions: dict[str, HeldSession] = {}
        self._expiries = Deadlines(self._expires_at_s)
        self._changed: set[str] = set()

    def __len__(self) -> int:
        """The number of sessions that are held."""
        return len(self._sessions)

    def adopt(self, record: SessionRecord) -> None:
        """Takes a session over. Adopting an epoch that is already held changes nothing. A session with `closes_after`
        takes only that turn.

        Raises StaleEpoch if a newer epoch is held, TurnInFlight while an older one has a turn in flight, and
        ModelChanged if this replica's model cannot continue the history.
        """
        held = self._sessions.get(record.session_id)
        if held is not None:
            if held.epoch == record.epoch:
                return
            if held.epoch > record.epoch:
                raise StaleEpoch(f"{named(record.session_id)} is held at epoch {held.epoch}")
            if held.turn is not None:
                raise TurnInFlight(f"{named(record.session_id)} has a turn in flight at an older epoch")
        history = unpack_tokens(record.history)
        if self._model is not None:
            self._model.check(record.session_id, record.model, history)
        chain = self._make_chain(record.tenant, "")
        chain.extend(history)
        self._hold(record, chain)

    def knows(self, session_id: str, epoch: int) -> bool:
        """True if the session is held at exactly this epoch."""
        session = self._sessions.get(session_id)
        return session is not None and session.epoch == epoch

    def epoch(self, session_id: str) -> int | None:
        """The epoch at which the session is held; None if it is not held."""
        session = self._sessions.get(session_id)
        return None if session is None else session.epoch

    def begin_turn(
        self,
        session_id: str,
        epoch: int,
        *,
        rewind_to: int | None = None,
        idempotency_key: str | None = None,
        digest: str | None = None,
        tools: str | None = None,
        cuttable: bool = False,
        expected_turn: int | None = None,
        adapter: str | None = None,
    ) -> Turn | Replay:
        """Starts a turn, or returns the stored result if a turn with the idempotency key ran before.

        `rewind_to` is the number of history tokens to keep. `digest` identifies the request: a replay with another
        digest is refused. `tools` identifies the tools that the turn names (None: none). If there is a history, they
        must be those that it begins with. `cuttable`: the turn may still be cut (`cut_turn`), so it may begin in a full
        session. `adapter`: with which adapter the model runs the turn (None: it does not run). If that is another one
        than that of the turn before, the history's chain is made anew, which costs the history's length.

        Raises SessionNotFound, StaleEpoch, IdempotencyConflict, SessionClosing, TurnInFlight, SessionIsTree,
        TurnDiffers if it is not the `expected_turn` (None: any), InvalidRewind, ToolsDiffer, CapacityExceeded, and what
        `make_chain` raises for the adapter (AdapterNotLoaded). After an error nothing is changed.
        """
        session = self._at_epoch(session_id, epoch)
        if idempotency_key is not None and (replay := session.replay(idempotency_key, digest)) is not None:
            return replay
        session.check_free(idempotency_key)
        session.check_line()
        if expected_turn not in (None, session.turns):
            raise TurnDiffers(
                f"x-session-turn: the next turn of {named(session_id)} is {session.turns}, not {expected_turn}"
            )
        history_len = session.kept_len(rewind_to)
        if history_len:
            session.check_tools(tools)
        if not cuttable:
            session.check_capacity(history_len + 1)
        self._chain_for(session, adapter)
        session.turn = Turn(
            session_id=session_id,
            epoch=epoch,
            turn_index=session.turns,
            history_len=history_len,
            chain=session.chain,
            room_tokens=session.room_tokens(history_len),
            idempotency_key=idempotency_key,
            digest=digest,
            tools=tools,
            open_key=session.open_key,
            checkpoints=session.checkpoints,
            whole=session.whole,
        )
        self._changed.add(session_id)
        return session.turn

    def cut_turn(self, turn: Turn, length: int) -> Turn:
        """Makes the turn in flight continue from the first `length` tokens of its history, like a turn that rewinds.
        Raises TurnNotInFlight."""
        session = self._in_flight(turn)
        assert 0 <= length <= turn.history_len
        session.turn = replace(turn, history_len=length, room_tokens=session.room_tokens(length))
        return session.turn

    def tried_key(
        self, session_id: str, epoch: int, digest: str, age_s: Callable[[bytes], float]
    ) -> str | None:
        """The key of the turn that a client retries without naming a key; None if its earlier try left no trace.

        It is the turn in flight, or the last committed one, if its client counts its tries and its request was the same
        (`digest`). Clients retry soon, so a turn older than TRIED_AGAIN_WITHIN_S does not count. Neither does the last
        turn if a later one with the same request was aborted. `age_s` tells how old an answer is, in seconds; it is
        asked about turns that were committed elsewhere.

        Raises SessionNotFound and StaleEpoch.
        """
        session = self._at_epoch(session_id, epoch)
        if isinstance(session.turn, Turn):
            key, asked = session.turn.idempotency_key, session.turn.digest
        else:
            last = next(reversed(session.results.values()), None)
            if last is None or last.turn_index != session.turns - 1 or session.undone == digest:
                return None
            here_s = session.committed_s
            if (age_s(last.result) if here_s is None else self._clock() - here_s) > TRIED_AGAIN_WITHIN_S:
                return None
            key, asked = last.idempotency_key, last.digest
        return key if key is not None and key.startswith(COUNTED_KEY) and asked == digest else None

    def begin_fork(self, session_id: str, epoch: int, length: int | None) -> Fork:
        """Begins a fork: lends the first `length` tokens (None: all) of the committed history to a future child.

        Raises SessionNotFound, StaleEpoch, SessionClosing, TurnInFlight and InvalidFork. After an error nothing is
        changed.
        """
        session = self._at_epoch(session_id, epoch)
        session.check_free()
        committed_len = len(session.chain)
        history_len = committed_len if length is None else length
        check_fork(committed_len, history_len)
        session.turn = fork = Fork(session_id, history_len, session.chain)
        self._changed.add(session_id)
        return fork

    def finish_fork(self, fork: Fork, child: SessionRecord) -> None:
        """Ends the fork: `child` (a record without history) is held from now on, with the lent history.

        Call it once the log holds the child. The child replaces a session of the same name and an earlier epoch. If
        that has a turn in flight, the child is not held, and is loaded from the log when it is used. Raises
        TurnNotInFlight.
        """
        parent = self._in_flight(fork)
        namesake = self._sessions.get(child.session_id)
        if namesake is None or (namesake.epoch < child.epoch and namesake.turn is None):
            places = tuple(each for each in parent.checkpoints if each.length <= fork.history_len)
            record = replace(child, tools=parent.tools, checkpoints=places, whole=parent.whole)
            self._hold(record, fork.chain.prefix(fork.history_len), parent.adapter)
        self._end_turn(parent)

    def abort_fork(self, fork: Fork) -> None:
        """Ends the fork without a trace: it was no use of the session. Raises TurnNotInFlight."""
        self._in_flight(fork).turn = None
        self._watch(fork.session_id)

    def prepare_commit(
        self,
        turn: Turn,
        new_tokens: Sequence[int],
        output_tokens: Sequence[int],
        result: bytes,
        checkpoint: Checkpoint | None = None,
        *,
        whole: bool = False,
        note: bytes = b"",
        opening_len: int = 0,
    ) -> TurnRecord:
        """Makes the turn's record for the session log. Changes nothing: the turn stays in flight. `checkpoint`,
        `whole`, `note` and `opening_len` are those of its TurnRecord.

        Raises TurnNotInFlight if the turn has ended, and CapacityExceeded if it is too long to be committed.
        """
        session = self._in_flight(turn)
        session.check_capacity(turn.history_len + len(new_tokens) + len(output_tokens))
        if checkpoint is not None:
            checkpoint = replace(checkpoint, template=self._template)
        return TurnRecord(
            session_id=turn.session_id,
            epoch=turn.epoch,
            turn_index=turn.turn_index,
            start_len=turn.history_len,
            tokens=encode_tokens(new_tokens) + encode_tokens(output_tokens),
            input_len=len(new_tokens),
            idempotency_key=turn.idempotency_key,
            result=result,
            digest=turn.digest,
            tools=turn.tools,
            model=None if self._model is None else self._model.fingerprint,
            checkpoint=checkpoint,
            whole=whole,
            note=note,
            opening_len=opening_len,
        )

    def commit_turn(self, turn: Turn, record: TurnRecord) -> None:
        """Ends the turn: history becomes `history[:start_len]` plus the record's tokens. O(new tokens).

        Call it once the log holds `record`, which `prepare_commit` made. Raises TurnNotInFlight.
        """
        session = self._in_flight(turn)
        assert (record.session_id, record.epoch) == (turn.session_id, turn.epoch)
        assert (record.turn_index, record.start_len) == (turn.turn_index, turn.history_len)
        session.commit(record, self._clock())
        self._end_turn(session)

    def abort_turn(self, turn: Turn) -> None:
        """Ends the turn without a trace. Raises TurnNotInFlight."""
        session = self._in_flight(turn)
        session.undone = turn.digest
        self._end_turn(session)

    def close(self, session_id: str) -> str | None:
        """Closes the session to new turns. Returns None if it waits for no turn: `drop` it now.

        Else returns the idempotency key of the turn that it waits for ("": it has none). Once that turn has ended,
        `is_closed` is true. Raises SessionNotFound.
        """
        session = self._get(session_id)
        session.closing = True
        self._watch(session_id)
        if session.turn is None:
            return session.awaited or None
        return (isinstance(session.turn, Turn) and session.turn.idempotency_key) or ""

    def is_closed(self, session_id: str) -> bool:
        """True if the session is closing and waits for no turn: `drop` it."""
        session = self._sessions.get(session_id)
        return session is not None and session.is_closed

    def expired(self) -> list[str]:
        """The expired sessions. Besides these it looks only at sessions that were used since the last look."""
        return list(self._expiries.due(self._clock()))

    def is_expired(self, session_id: str) -> bool:
        """Whether the session was idle for longer than its timeout. If it is closing, that is the time that an awaited
        turn has to come. Never true in a turn."""
        return session_id in self._sessions and self._expires_at_s(session_id) < self._clock()

    def drop(self, session_id: str) -> None:
        """Forgets the session. Unknown ids are fine. Raises TurnInFlight if it has a turn: end that first."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.turn is not None:
            raise TurnInFlight(f"{named(session_id)} has a turn in flight")
        del self._sessions[session_id]
        self._expiries.forget(session_id)
        self._changed.add(session_id)

    def take_changed(self) -> set[str]:
        """The sessions whose status has changed since the last call, including dropped ones."""
        changed, self._changed = self._changed, set()
        return changed

    def held(self) -> list[str]:
        """The ids of all sessions that are held."""
        return list(self._sessions)

    def status(self, session_id: str) -> SessionStatus | None:
        """The session's status; None if it is not held. `size_bytes` is left 0: only the engine knows it."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return SessionStatus(
            session_id=session_id,
            epoch=session.epoch,
            tokens=len(session.chain),
            turns=session.turns,
            idle_s=0.0 if session.turn is not None else self._clock() - session.idle_since_s,
            in_turn=session.turn is not None,
            closing=session.closing,
        )

    def snapshot(self) -> list[SessionStatus]:
        """The status of every held session."""
        return [status for name in self._sessions if (status := self.status(name)) is not None]

    def checkpoints(self, session_id: str) -> Sequence[Checkpoint]:
        """The session's checkpoints, oldest first, for reading only. Raises SessionNotFound."""
        return self._get(session_id).checkpoints

    def committed_len(self, session_id: str) -> int:
        """Committed tokens of the session. Raises SessionNotFound."""
        return len(self._get(session_id).chain)

    @property
    def _template(self) -> str | None:
        """The template that renders this replica's prompts. Checkpoints of another template are not used."""
        return None if self._model is None else self._model.fingerprint.template

    def _get(self, session_id: str) -> HeldSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"{named(session_id)} is not held here")
        return session

    def _at_epoch(self, session_id: str, epoch: int) -> HeldSession:
        session = self._get(session_id)
        if session.epoch != epoch:
            raise StaleEpoch(f"{named(session_id)} is held at epoch {session.epoch}, not {epoch}")
        return session

    def _chain_for(self, session: HeldSession, adapter: str | None) -> None:
        if adapter is None or adapter == session.adapter:
            return
        chain = self._make_chain(session.tenant, adapter)
        chain.extend(session.chain.tokens[:])  # of a copy, whose items come quicker
        session.chain, session.adapter = chain, adapter

    def _hold(self, record: SessionRecord, chain: HistoryChain, adapter: str = "") -> None:
        self._sessions[record.session_id] = HeldSession(
            session_id=record.session_id,
            epoch=record.epoch,
            tenant=record.tenant,
            adapter=adapter,
            chain=chain,
            turns=record.turns,
            timeout_s=self._default_timeout_s if record.timeout_s is None else record.timeout_s,
            capacity_tokens=record.capacity_tokens,
            results=OrderedDict((r.idempotency_key, r) for r in record.results),
            idle_since_s=self._clock(),
            tools=record.tools,
            closing=record.closes_after is not None,
            awaited=record.closes_after,
            open_key=record.open_key,
            checkpoints=[each for each in record.checkpoints if each.template == self._template],
            whole=record.whole,
        )
        self._watch(record.session_id)

    def _watch(self, session_id: str) -> None:
        """Watches the deadline of a session that is new, or may be due earlier than before."""
        self._expiries.watch(session_id, self._expires_at_s(session_id))
        self._changed.add(session_id)

    def _expires_at_s(self, session_id: str) -> float:
        """When the session is to be ended, if it is not used until then. In a turn: as if the turn ended now."""
        session = self._sessions[session_id]
        if session.is_closed:
            return -math.inf
        idle_since_s = session.idle_since_s if session.turn is None else self._clock()
        return idle_since_s + idle_timeout_s(session.timeout_s, closing=session.closing)

    def _in_flight(self, turn: Turn | Fork) -> HeldSession:
        session = self._sessions.get(turn.session_id)
        if session is None or session.turn is not turn:
            raise TurnNotInFlight(f"the turn or fork of {named(turn.session_id)} has ended")
        return session

    def _end_turn(self, session: HeldSession) -> None:
        session.turn = None
        session.idle_since_s = self._clock()
        self._changed.add(session.session_id)
        if session.closing:
            self._watch(session.session_id)
