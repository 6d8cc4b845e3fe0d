"""A session as its owner holds it: what a new turn must be checked against, and what a committed turn changes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from controllers.errors import (
    CapacityExceeded,
    IdempotencyConflict,
    InvalidRewind,
    SessionClosing,
    SessionIsTree,
    ToolsDiffer,
    TurnInFlight,
)
from controllers.history_chain import HistoryChain
from controllers.records import TREE_KEY, Checkpoint, StoredResult, TurnRecord
from controllers.session_keys import named
from controllers.session_log.kept_answers import kept_of, lost, outdated
from controllers.tokens import unpack_tokens
from controllers.turns import Fork, Replay, Turn

MOST_CHECKPOINTS = 1024
"""The most checkpoints of one session. A conversation that goes back further is recognized by its tokens."""


@dataclass(slots=True, eq=False)
class HeldSession:
    """`chain` is made for `adapter`, that of the last turn."""

    session_id: str
    epoch: int
    tenant: str
    chain: HistoryChain
    turns: int
    timeout_s: float
    capacity_tokens: int | None
    results: OrderedDict[str, StoredResult]
    idle_since_s: float
    tools: str | None
    adapter: str = ""
    open_key: str | None = None
    turn: Turn | Fork | None = None
    closing: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)
    whole: bool = False
    awaited: str | None = None
    """If the session was already closing when it was adopted: the key of the turn that may still come."""
    committed_s: float | None = None
    """When the last turn was committed here. None: none was since the session was adopted."""
    undone: str | None = None
    """The digest of the last turn that was begun, if it was aborted and no turn has been committed since."""

    @property
    def is_closed(self) -> bool:
        """Whether it is closing and waits for no turn."""
        return self.closing and self.turn is None and not self.awaited

    def check_free(self, turn_key: str | None = None) -> None:
        """Raises SessionClosing, unless the turn with this key may still come, and TurnInFlight."""
        if self.closing and (turn_key is None or turn_key != self.awaited):
            raise SessionClosing(f"{named(self.session_id)} is closing")
        if self.turn is not None:
            what = "is being forked" if isinstance(self.turn, Fork) else "has a turn in flight"
            raise TurnInFlight(f"{named(self.session_id)} {what}")

    def check_line(self) -> None:
        """Raises SessionIsTree."""
        if self.open_key is not None and self.open_key.startswith(TREE_KEY):
            raise SessionIsTree(
                f"{named(self.session_id)} is a tree of requests of /generate; a session of turns is opened with "
                "streaming"
            )

    def check_tools(self, tools: str | None) -> None:
        """Raises ToolsDiffer unless a turn that continues the history may name these (None: none)."""
        if tools in (None, self.tools):
            return
        began = "no tools" if self.tools is None else "others"
        raise ToolsDiffer(
            f"tools: {named(self.session_id)} began with {began}. Its turns name the tools of the first one, or none; "
            "open another session for these."
        )

    def check_capacity(self, num_tokens: int) -> None:
        """Raises CapacityExceeded if the history may not have so many tokens."""
        if self.capacity_tokens is not None and num_tokens > self.capacity_tokens:
            raise CapacityExceeded(
                f"{named(self.session_id)} was opened for {self.capacity_tokens} tokens; this turn needs {num_tokens}"
            )

    def kept_len(self, rewind_to: int | None) -> int:
        """Tokens of history that a turn continues from (`rewind_to` None: from all). Raises InvalidRewind."""
        committed_len = len(self.chain)
        history_len = committed_len if rewind_to is None else rewind_to
        if not 0 <= history_len <= committed_len:
            raise InvalidRewind(
                f"cannot rewind to {history_len}: committed history has {committed_len} tokens"
            )
        return history_len

    def room_tokens(self, history_len: int) -> int | None:
        """How many tokens may follow `history_len` tokens of history. None: no limit."""
        return None if self.capacity_tokens is None else self.capacity_tokens - history_len

    def replay(self, idempotency_key: str, digest: str | None) -> Replay | None:
        """The answer of the turn that had this key; None if none had. Raises IdempotencyConflict if that turn's request
        was another one."""
        stored = self.results.get(idempotency_key)
        if stored is None:
            return None
        if digest is not None and stored.digest is not None and digest != stored.digest:
            raise IdempotencyConflict(f"key {stored.idempotency_key!r} was used for a different request")
        return Replay(stored.turn_index, stored.result)

    def commit(self, record: TurnRecord, now_s: float) -> None:
        """Makes the turn part of the session, as the log does. O(new tokens)."""
        if record.start_len < len(self.chain):
            self._forget_cut_answers(record.start_len)
        self.chain.cut(record.start_len)
        self.chain.extend(unpack_tokens(record.tokens))
        if record.start_len == 0:
            self.tools = record.tools
        while self.checkpoints and self.checkpoints[-1].length > record.start_len:
            self.checkpoints.pop()
        if record.checkpoint is not None:
            self.checkpoints.append(record.checkpoint)
            del self.checkpoints[:-MOST_CHECKPOINTS]
        self.whole = self.whole or record.whole
        self.turns += 1
        self.undone = self.awaited = None
        self.committed_s = now_s
        if record.idempotency_key is not None:
            self.results[record.idempotency_key] = kept_of(record)
            keys = list(self.results)
            for place in outdated(keys):
                del self.results[keys[place]]

    def _forget_cut_answers(self, length: int) -> None:
        """Deletes the answers that the log deletes when the history is cut to `length` tokens."""
        by_turn = {kept.turn_index: kept for kept in self.results.values()}
        ends = {turn: kept.end_len for turn, kept in by_turn.items() if kept.end_len is not None}
        for turn in lost(by_turn, ends, length):
            kept = by_turn[turn]
            self.results[kept.idempotency_key] = replace(kept, result=b"")
