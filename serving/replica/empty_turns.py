"""Turns without tokens, which the engine does not see: rewinds and notes. They are committed like all others."""

from __future__ import annotations

from controllers.errors import ControllerError
from controllers.session import SessionController
from controllers.turns import Turn
from serving.background import BackgroundTasks
from serving.replica.ending_turns import EndingTurns
from serving.replica.session_host import SessionHost
from serving.replica.turn_commits import TurnCommits
from serving.wire.calls import KeepNote, RewindSession
from serving.wire.transcripts import encode_said
from serving.wire.turns import SaidTurn


class EmptyTurns:
    """Commits empty turns, each once per key. One that has begun completes even if its caller is cancelled."""

    def __init__(
        self,
        sessions: SessionController,
        host: SessionHost,
        commits: TurnCommits,
        ending: EndingTurns,
        tasks: BackgroundTasks,
    ) -> None:
        self._sessions = sessions
        self._host = host
        self._commits = commits
        self._ending = ending
        self._tasks = tasks

    async def rewind(self, call: RewindSession) -> None:
        """Keeps the first committed tokens: commits a turn that starts behind them. Raises ControllerError."""
        await self._run(call, rewind_to=call.length)

    async def keep_note(self, call: KeepNote) -> None:
        """Commits a turn with a note. Raises ControllerError."""
        said = encode_said(SaidTurn(note=call.note))
        await self._run(call, said, expected_turn=call.expected_turn)

    async def _run(
        self,
        call: RewindSession | KeepNote,
        said: bytes = b"",
        *,
        rewind_to: int | None = None,
        expected_turn: int | None = None,
    ) -> None:
        await self._ending.over(call.session_id, call.key)
        await self._host.hold_unforked(call.session_id, call.epoch)
        turn = self._sessions.begin_turn(
            call.session_id,
            call.epoch,
            rewind_to=rewind_to,
            idempotency_key=call.key or None,
            cuttable=True,
            expected_turn=expected_turn,
        )
        if isinstance(turn, Turn):
            await self._tasks.outcome(self._ending.start(turn, self._commit(turn, said)))

    async def _commit(self, turn: Turn, said: bytes) -> None:
        record = self._sessions.prepare_commit(turn, (), (), b"", note=said)
        try:
            await self._commits.commit(record)
        except ControllerError:  # only the log knows whether it was committed
            await self._host.let_go(turn)
            raise
        self._sessions.commit_turn(turn, record)
        # The engine cuts the KV before it takes the next turn's request. So nobody need wait for a step of the engine.
        self._tasks.start(self._host.cut_kv(turn.session_id, turn.history_len))
        await self._host.turn_ended(turn.session_id)
