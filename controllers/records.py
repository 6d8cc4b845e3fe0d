"""Plain records that replicas, the cluster controller and the session log exchange. Frozen and picklable.

Tokens are uint32, little endian (controllers/tokens.py). `*_s` are seconds. Points in time are Unix time of the cluster
controller's clock; `idle_s` and `timeout_s` are durations. `result` bytes are opaque here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controllers.tokens import count_tokens
from controllers.wire_record import wire_record


@wire_record
@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Which model made a history, each part a hash (serving/text/fingerprint.py).

    `tokenizer` identifies what each token id stands for. Histories are tokens, so only a model with the same tokenizer
    can continue them. `weights` (None: not known) and `template` (None: there is none) may change. They are recorded
    for information.
    """

    tokenizer: str
    weights: str | None = None
    template: str | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a history by which a whole conversation is recognized.

    The conversation's first `num_messages` messages, of which `digest` is a hash, are the history's first `length`
    tokens, as `template` renders them (see ModelFingerprint). These include the opening of the answer."""

    num_messages: int
    digest: bytes
    length: int
    template: str | None = None


TREE_KEY = "tree-"
"""The prefix of the `open_key` of a session that is a tree of requests. Such a session takes no turns, only forks."""

COUNTED_KEY = "try-"
"""The prefix of the keys that a front end gives to turns whose clients count their tries but name no key."""


@wire_record
@dataclass(frozen=True, slots=True)
class StoredResult:
    """The answer of a turn with an idempotency key. `digest` identifies the request (None: not known). `result` is
    empty if the turn had none, or if it was deleted. `end_len` is where the turn ends in the history (None: not known)
    """

    idempotency_key: str
    turn_index: int
    result: bytes
    digest: str | None = None
    end_len: int | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as its owner needs it: identity, committed history and the results that can be replayed.

    `timeout_s` None is the default idle timeout; `capacity_tokens` None is unlimited. `results` are oldest first.
    `open_key` identifies the request that opened the session, so that a retried open is recognized. `tools` identifies
    the tools that the history begins with (None: none). `model` made the last turn (None: there is no history, or it
    was logged before models were recorded). `closes_after`: see LedgerEntry. `checkpoints` are oldest first. `whole`:
    the client has sent whole histories.
    """

    session_id: str
    tenant: str
    epoch: int
    replica_id: str
    history: bytes = b""
    turns: int = 0
    timeout_s: float | None = None
    capacity_tokens: int | None = None
    created_s: float = 0.0
    results: tuple[StoredResult, ...] = ()
    open_key: str | None = None
    tools: str | None = None
    model: ModelFingerprint | None = None
    closes_after: str | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    whole: bool = False

    @property
    def num_tokens(self) -> int:
        return count_tokens(self.history)


@wire_record
@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One committed turn: history becomes `history[:start_len] + tokens`.

    `turn_index` is the number of committed turns before this one. The first `input_len` of `tokens` are input, the rest
    output. `start_len` below the committed length is a rewind. `tools` identifies the tools that the turn named; if the
    turn begins the history, they become the session's. `model` made the turn (None: not told).

    `checkpoint` is where the answer begins, if the request had a `whole` history or began one. `note` holds what was
    said, for readers of the session (serving/wire/transcripts.py); empty: nothing is kept. The last `opening_len`
    tokens of the input only open the answer. They may be rendered differently when the conversation continues.
    """

    session_id: str
    epoch: int
    turn_index: int
    start_len: int
    tokens: bytes
    input_len: int
    idempotency_key: str | None = None
    result: bytes = b""
    digest: str | None = None
    tools: str | None = None
    model: ModelFingerprint | None = None
    checkpoint: Checkpoint | None = None
    whole: bool = False
    note: bytes = b""
    opening_len: int = 0

    @property
    def asked_len(self) -> int:
        """Where the answer begins, in tokens."""
        return self.start_len + self.input_len

    @property
    def end_len(self) -> int:
        """Committed length after this turn, in tokens."""
        return self.start_len + count_tokens(self.tokens)


@wire_record
@dataclass(frozen=True, slots=True)
class TurnNote:
    """What is kept of a committed turn besides its tokens.

    Its tokens are those of the history from `start_len` to `end_len`. The answer begins at `asked_len`, and the
    `opening_len` tokens before that open it. In a fork `turn_index` is negative for turns of the parent. If the history
    continues from within the opening, or is cut there, `end_len` is less than `asked_len`."""

    turn_index: int
    start_len: int
    asked_len: int
    end_len: int
    checkpoint: Checkpoint | None = None
    whole: bool = False
    note: bytes = b""
    opening_len: int = 0

    @property
    def said_len(self) -> int:
        """Where the turn's input ends, without the tokens that open the answer."""
        return self.asked_len - self.opening_len

    def cut(self, length: int) -> TurnNote:
        """The note if only the first `length` tokens of the history are left. `length` is at least `said_len`."""
        if self.end_len <= length:
            return self
        place = self.checkpoint
        return replace(
            self, end_len=length, checkpoint=None if place is None or place.length > length else place
        )


@wire_record
@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A fork to make: the session `child_id` begins with the parent's first `length` tokens (None: all).

    `timeout_s` None is the parent's idle timeout. `fork_key` identifies the request, so that a repeated one is
    recognized.
    """

    child_id: str
    fork_key: str
    length: int | None = None
    timeout_s: float | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class ForkedHistory:
    """What a fork begins with, for another session log than its parent's. `parent` has the history as the child gets
    it, and no results. `notes` are those that the child inherits."""

    parent: SessionRecord
    notes: tuple[TurnNote, ...] = ()


@wire_record
@dataclass(frozen=True, slots=True)
class Assignment:
    """The owner of a session. `fresh`: this call opened or moved the session, so the owner has not loaded it yet.
    `open_key` tells it from earlier and later sessions of the same name. `age_s`: how long ago it was opened, by the
    controller's Unix clock (None: the controller's version does not tell)."""

    session_id: str
    replica_id: str
    epoch: int
    fresh: bool
    open_key: str | None = None
    age_s: float | None = field(default=None, compare=False)


@wire_record
@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A session as the ledger knows it. Its owner reported `size_bytes` and `in_turn` at `reported_s`, which is in the
    controller's attended time (None: the owner has not reported that it holds the session). `used_since_report`:
    the controller has seen the session used since then.

    `closes_after`: the session is to be closed when the turn with this idempotency key has ended ("": the turn in
    flight had no key). It takes no other turn. None: the session is open.
    """

    session_id: str
    tenant: str
    replica_id: str
    epoch: int
    tokens: int
    turns: int
    created_s: float
    last_used_s: float
    size_bytes: int = 0
    in_turn: bool = False
    reported_s: float | None = None
    timeout_s: float | None = None
    capacity_tokens: int | None = None
    open_key: str | None = None
    used_since_report: bool = True
    closes_after: str | None = None

    @classmethod
    def of(cls, record: SessionRecord, last_used_s: float) -> LedgerEntry:
        """The entry of a session that no replica has reported yet."""
        return cls(
            session_id=record.session_id,
            tenant=record.tenant,
            replica_id=record.replica_id,
            epoch=record.epoch,
            tokens=record.num_tokens,
            turns=record.turns,
            created_s=record.created_s,
            last_used_s=last_used_s,
            timeout_s=record.timeout_s,
            capacity_tokens=record.capacity_tokens,
            open_key=record.open_key,
        )

    def record(
        self,
        history: bytes = b"",
        results: tuple[StoredResult, ...] = (),
        tools: str | None = None,
        model: ModelFingerprint | None = None,
        notes: Sequence[TurnNote] = (),
    ) -> SessionRecord:
        """The session as its owner needs it. The arguments are what the ledger does not know."""
        return SessionRecord(
            session_id=self.session_id,
            tenant=self.tenant,
            epoch=self.epoch,
            replica_id=self.replica_id,
            history=history,
            turns=self.turns,
            timeout_s=self.timeout_s,
            capacity_tokens=self.capacity_tokens,
            created_s=self.created_s,
            results=results,
            open_key=self.open_key,
            tools=tools,
            model=model,
            closes_after=self.closes_after,
            checkpoints=tuple(each.checkpoint for each in notes if each.checkpoint is not None),
            whole=any(each.whole for each in notes),
        )


@wire_record
@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where a process listens: on its node at the socket `path`, for other nodes at `url`. There it authenticates with
    the secret key of `public_key` (CurveZMQ, Z85)."""

    node_id: str
    path: str
    url: str
    public_key: str


@wire_record
@dataclass(frozen=True, slots=True)
class ReplicaAddress(SocketAddress):
    """Where front ends reach a replica. `actor` and `namespace` are Ray's names for its process. The cluster controller
    only passes the address on."""

    actor: str
    namespace: str


@wire_record
@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica reports of itself.

    `draining`: it hands its sessions over, and ends. `step_age_s` is how long the engine's step has been under way (0:
    none is). The cluster controller sets `seen_s`, in its attended time. `settings_hash` is the same for all replicas
    with the same settings. `held` is the number of named sessions whose history it has, in a report with which the
    controller knows all of them (None: it does not yet, or the replica is of an earlier version). `fault`: the fault of
    the engine for which the replica ends, if there is one.
    """

    replica_id: str
    free_tokens: int
    total_tokens: int
    sessions: int = 0
    running: int = 0
    waiting: int = 0
    draining: bool = False
    seen_s: float = 0.0
    step_age_s: float = 0.0
    settings_hash: str = ""
    address: ReplicaAddress | None = None
    held: int | None = None
    fault: str = ""


@wire_record
@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What a replica reports of a session that it holds. `idle_s` is 0 during a turn."""

    session_id: str
    epoch: int
    tokens: int
    turns: int
    idle_s: float
    in_turn: bool
    closing: bool = False
    size_bytes: int = 0


@wire_record
@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a replica reports of its sessions with a heartbeat, see controllers/session_reports.py.

    `changed` and `dropped` (sessions that it no longer holds) are new since the report with the number `since`. With
    `since` 0 the replica begins to report every session that it holds. Numbers begin at 1 and grow.
    """

    number: int
    since: int
    changed: tuple[SessionStatus, ...] = ()
    dropped: tuple[str, ...] = ()


@wire_record
@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The controller's answer to a heartbeat.

    `known` False: the replica counts as gone, and must register again before it owns anything new.
    `stale_sessions`: sessions that it holds, at `stale_epochs`, but that are closed or owned elsewhere. It must drop
    them. `crowded`: until it hears otherwise, it must offer each session of which a turn begins (`offer_session`).
    `draining`: it must hand its sessions over between turns, and end once it is empty.
    `wants_all`: the report was not understood, and the replica must report every session again.
    """

    known: bool
    stale_sessions: tuple[str, ...] = ()
    crowded: bool = False
    draining: bool = False
    stale_epochs: tuple[int, ...] = ()
    wants_all: bool = False


EVENT_KINDS = (
    "opened",
    "closed",
    "moved",
    "taken_over",
    "drained",
    "replica_up",
    "replica_down",
    "demoted",
    "promoted",
    "audit",
)
"""The kinds of events. The controller reports all but the last three. Front ends find these in replicas' figures."""


@wire_record
@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to a session or to a replica. `session_id` is the session's key. `number` counts the
    controller's events. `to_replica_id` owns the session from then on."""

    number: int
    at_s: float
    kind: str
    session_id: str | None = None
    replica_id: str | None = None
    to_replica_id: str | None = None
    detail: str = ""


@wire_record
@dataclass(frozen=True, slots=True)
class ClusterView:
    """The controller's view for watchers. `sessions` is the number of sessions, and `recent` are the most recently used
    ones, newest first. `states` are the states of all known replicas. `cursor` is that of the last event."""

    sessions: int
    recent: tuple[LedgerEntry, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    events: tuple[ClusterEvent, ...] = ()
    cursor: str = ""
