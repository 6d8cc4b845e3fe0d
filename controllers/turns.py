"""What can be in flight in a session (a turn or a fork), and the answer of a turn that ran before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controllers.history_chain import HistoryChain
from controllers.records import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn in flight. Ended by exactly one of `commit_turn` and `abort_turn`.

    Ownership: `chain` is the session's own, lent for reading. Its first `history_len` tokens do not change until the
    turn ends. `checkpoints`, oldest first, are lent in the same way. `room_tokens` is how many tokens the turn may add
    (None: no limit). `open_key` tells the session from earlier and later ones of its name. `whole`: the session's
    client has sent whole histories before.
    """

    session_id: str
    epoch: int
    turn_index: int
    history_len: int
    chain: HistoryChain
    room_tokens: int | None = None
    idempotency_key: str | None = None
    digest: str | None = None
    tools: str | None = None
    open_key: str | None = None
    checkpoints: Sequence[Checkpoint] = ()
    whole: bool = False

    @property
    def history(self) -> Sequence[int]:
        """All tokens of `chain`."""
        return self.chain.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """A fork in flight. Until it ends the parent takes no turn. Ended by one of `finish_fork` and `abort_fork`.

    Ownership: `chain` is the parent's own, lent for reading. It does not change until the fork ends.
    """

    session_id: str
    history_len: int
    chain: HistoryChain

    @property
    def history(self) -> Sequence[int]:
        """All tokens of `chain`."""
        return self.chain.tokens


@dataclass(frozen=True, slots=True)
class Replay:
    """A turn that ran before. `result` is its answer; empty if it had none, or if it was deleted."""

    turn_index: int
    result: bytes
