"""Unnamed sessions: conversations whose clients name no session. They are recognized by their messages.

They are kept for a while, and in no log. Their clients send the whole conversation each time, so losing a replica costs
only time. When a conversation continues, its tokens are here and its KV is in the engine. Two turns that continue the
same conversation at once share the KV that the prefix tree has.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from controllers.errors import TurnNotInFlight
from controllers.records import Checkpoint, SessionRecord
from controllers.session import SessionController
from controllers.turns import Turn
from engine.api import Engine, EngineError
from serving.wire.turns import ChatPrompt, TurnCall

logger = logging.getLogger(__name__)

EPOCH = 1
MOST_TOKENS = 2**24
"""The limit for all conversations together: 64 MiB at four bytes per token, and 16 bytes more per page for its hash."""
MOST_SESSIONS = 16_384


class UnnamedSessions:
    """A replica's unnamed sessions. Used on the replica's event loop only. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float], idle_timeout_s: float, engine: Engine) -> None:
        self._sessions = SessionController(clock, idle_timeout_s, make_chain=engine.empty_chain)
        self._engine = engine
        self._by_digest: dict[bytes, str] = {}
        self._used: OrderedDict[str, int] = OrderedDict()
        """Tokens by session, least recently used first."""
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, session_id: str) -> bool:
        """Also true for a session whose first turn is in flight."""
        return self._sessions.epoch(session_id) is not None

    def begin(self, call: TurnCall) -> Turn | None:
        """Begins a turn of the conversation that the call continues, or of a new one. None if the call has a session,
        is not a chat that can be recognized, or wants log-probabilities of its input."""
        prompt = call.prompt
        if call.session is not None or not isinstance(prompt, ChatPrompt) or not prompt.said:
            return None
        if call.logprobs is not None and call.logprobs.input_start is not None:
            return None  # all of its input is computed anyway
        session_id = self._idle_with(prompt)
        if session_id is None:
            session_id = f"~{uuid.uuid4().hex}"
            self._sessions.adopt(SessionRecord(session_id, call.tenant, EPOCH, replica_id=""))
        turn = self._sessions.begin_turn(session_id, EPOCH, adapter=call.adapter)
        assert isinstance(turn, Turn)
        return turn

    def cut(self, turn: Turn, length: int) -> Turn:
        """Makes the turn continue from the first `length` tokens of its history. Raises TurnNotInFlight."""
        return self._sessions.cut_turn(turn, length)

    def commit(
        self, turn: Turn, new_tokens: list[int], output_tokens: list[int], checkpoint: Checkpoint | None
    ) -> None:
        """Commits the turn. Raises TurnNotInFlight."""
        before = self._digests(turn.session_id)
        record = self._sessions.prepare_commit(turn, new_tokens, output_tokens, b"", checkpoint)
        self._sessions.commit_turn(turn, record)
        for digest in before - self._digests(turn.session_id):
            self._forget_digest(digest, turn.session_id)
        if checkpoint is not None:
            self._by_digest[checkpoint.digest] = turn.session_id
        self._num_tokens += record.end_len - self._used.pop(turn.session_id, 0)
        self._used[turn.session_id] = record.end_len
        self._make_room()

    def abort(self, turn: Turn) -> None:
        """Leaves no trace of the turn, nor of a conversation that it began."""
        try:
            self._sessions.abort_turn(turn)
        except TurnNotInFlight:
            return
        if turn.session_id not in self._used:
            self._end(turn.session_id)

    async def expire_idle(self) -> None:
        """Ends the conversations past their idle timeout. To be called every few seconds."""
        for session_id in self._sessions.expired():
            if self._sessions.is_expired(session_id):
                self._end(session_id)
        self._sessions.take_changed()  # nobody reports them, and they must not pile up

    def forget_all(self) -> None:
        """Ends all conversations except those in a turn."""
        for session_id in list(self._used):
            self._end_if_idle(session_id)

    def _idle_with(self, prompt: ChatPrompt) -> str | None:
        """The conversation with the longest match of the prompt's messages, of those that are not in a turn."""
        for said in reversed(prompt.said):
            session_id = self._by_digest.get(said.digest)
            if session_id is not None and not self._in_turn(session_id):
                return session_id
        return None

    def _in_turn(self, session_id: str) -> bool:
        status = self._sessions.status(session_id)
        return status is None or status.in_turn

    def _make_room(self) -> None:
        for session_id in list(self._used):
            if self._num_tokens <= MOST_TOKENS and len(self._used) <= MOST_SESSIONS:
                return
            self._end_if_idle(session_id)

    def _end_if_idle(self, session_id: str) -> None:
        if not self._in_turn(session_id):
            self._end(session_id)

    def _end(self, session_id: str) -> None:
        for digest in self._digests(session_id):
            self._forget_digest(digest, session_id)
        self._sessions.drop(session_id)
        self._num_tokens -= self._used.pop(session_id, 0)
        try:
            self._engine.close_session(session_id).add_done_callback(_note_failure)
        except EngineError as error:
            logger.warning("the KV of an unnamed session was not freed: %r", error)

    def _digests(self, session_id: str) -> set[bytes]:
        return {checkpoint.digest for checkpoint in self._sessions.checkpoints(session_id)}

    def _forget_digest(self, digest: bytes, session_id: str) -> None:
        if self._by_digest.get(digest) == session_id:
            del self._by_digest[digest]


def _note_failure(closed: Future[Any]) -> None:
    if not closed.cancelled() and (error := closed.exception()) is not None:
        logger.warning("the KV of an unnamed session was not freed: %r", error)
