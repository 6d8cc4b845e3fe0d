"""Plain records that replicas, the cluster controller and the session log exchange. Frozen and picklable.

Tokens are uint32, little endian (controllers/tokens.py). `*_s` are seconds: points in time are Unix time of
the cluster controller's clock, `idle_s` and `timeout_s` are durations. `result` bytes are opaque here.
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

    `tokenizer` identifies what each token id stands for: histories are tokens, so only a model of the same one can
    continue them. `weights` and `template` (None: not known, none) may change; they are recorded to be told.
    """

    tokenizer: str
    weights: str | None = None
    template: str | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a history that a whole conversation is recognized by: its first `num_messages` messages, of which
    `digest` is a hash, are the first `length` tokens, the opening of the answer to them included, as `template` writes
    them (see ModelFingerprint)."""

    num_messages: int
    digest: bytes
    length: int
    template: str | None = None


TREE_KEY = "tree-"
"""How the `open_key` of a session begins that is a tree of requests: it takes no turns itself, its forks do."""

COUNTED_KEY = "try-"
"""How the keys of turns begin whose clients count their tries but name no key: the front end gives each try one."""


@wire_record
@dataclass(frozen=True, slots=True)
class StoredResult:
    """What a turn with an idempotency key answered. `digest` identifies the request, if one was given."""

    idempotency_key: str
    turn_index: int
    result: bytes
    digest: str | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as its owner needs it: identity, committed history and the results that can be replayed.

    `timeout_s` None is the default idle timeout; `capacity_tokens` None is unlimited. `results` is oldest
    first. `open_key` identifies the request that opened the session, so that a retried open is recognized. `tools`
    identifies those that its history begins with (None: none). `model` made the last turn (None: there is no history,
    or it was logged before models were recorded). `closes_after`: see LedgerEntry. `checkpoints` are oldest first.
    `whole`: its client has sent whole histories.
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

    `turn_index` counts the session's committed turns before this one. The first `input_len` of `tokens` are
    input, the rest output. `start_len` below the committed length is a rewind. `tools` identifies those that the
    turn named; where it begins the history they are the session's. `model` made the turn (None: not told).

    `checkpoint` is where its answer begins, if it was asked with a `whole` history, or began with one. `note` tells
    what was said, for those who read the session (serving/wire/transcripts.py); empty: nothing is kept of it.
    The last `opening_len` tokens of the input say nothing: they open the answer, and may be written otherwise when the
    conversation goes on.
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
        """Where its answer begins, in tokens."""
        return self.start_len + self.input_len

    @property
    def end_len(self) -> int:
        """Committed length after this turn, in tokens."""
        return self.start_len + count_tokens(self.tokens)


@wire_record
@dataclass(frozen=True, slots=True)
class TurnNote:
    """What is kept of a committed turn beside its tokens, which are those from `start_len` to `end_len` of the history,
    its answer those from `asked_len`, behind `opening_len` that open it. In a fork `turn_index` is negative for turns
    of its parent. A history that goes on from within the opening, or is cut there, has an `end_len` before
    `asked_len`."""

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
        """Where what the turn was asked ends."""
        return self.asked_len - self.opening_len

    def cut(self, length: int) -> TurnNote:
        """Of a history of which only the first `length` tokens are left, `said_len` at least."""
        if self.end_len <= length:
            return self
        place = self.checkpoint
        return replace(
            self, end_len=length, checkpoint=None if place is None or place.length > length else place
        )


@wire_record
@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A session to start from another: `child_id` gets its first `length` tokens (None: all of them).

    `timeout_s` None is the parent's idle timeout. `fork_key` identifies the request, so that a repeated one is
    recognized.
    """

    child_id: str
    fork_key: str
    length: int | None = None
    timeout_s: float | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class Assignment:
    """Who owns a session. `fresh`: created or moved by this very call, so the owner has not loaded it yet. `open_key`
    tells it from earlier and later ones of its name."""

    session_id: str
    replica_id: str
    epoch: int
    fresh: bool
    open_key: str | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A session as the ledger knows it. `size_bytes` and `in_turn` are what its owner said at `reported_s`, which is in
    the controller's attended time; None: not that it holds the session. `used_since_report` is what the controller has
    seen happen since then.

    `closes_after`: the session is to be closed when the turn of this idempotency key has ended ("": whatever was in
    flight had no key). It takes no other turn. None: it is open.
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
        """Of a session that nobody has reported yet."""
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
        """The session as its owner needs it, with what the ledger does not know."""
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
class ReplicaAddress:
    """Where front ends reach a replica: those of its node by a socket's `path`, others by `url`, where it proves itself
    with the secret half of `public_key` (CurveZMQ, Z85). `actor` and `namespace` are Ray's names for its process. The
    cluster controller only hands it on."""

    node_id: str
    path: str
    url: str
    public_key: str
    actor: str
    namespace: str


@wire_record
@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica reports of itself. `draining`: it is to go, and hands its sessions over. `step_age_s` is how long
    the engine's step has been under way (0: none is). `seen_s` is set by the cluster controller, on a clock of its own.
    `settings_hash` is the same of all replicas with the same settings. `held` are the named sessions whose history it
    has, once the controller has heard of all of them (None: it has not, or an earlier version does not say). `fault`:
    why it ends, where it is for a fault of its engine.
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
    """What a replica reports of a session it holds. `idle_s` is 0 during a turn."""

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
    """What a replica says of its sessions with a heartbeat, see controllers/session_reports.py.

    `changed` and `dropped` (it does not hold these any more) are new since its report `since`. With one since 0 it
    begins to tell of every session that it holds. Numbers begin at 1 and grow.
    """

    number: int
    since: int
    changed: tuple[SessionStatus, ...] = ()
    dropped: tuple[str, ...] = ()


@wire_record
@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The controller's answer to a heartbeat.

    `known` False: the replica was taken for gone; it must register again before it owns anything new.
    `stale_sessions`: those that it holds, at `stale_epochs`, and that are closed or owned elsewhere; it must drop them.
    `crowded`: it is to offer each session of which a turn begins (`offer_session`), until it hears otherwise.
    `draining`: it is to go: to hand each of its sessions over between turns, and to end once it is empty.
    `wants_all`: the report was not understood, and the next is to have every session.
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
"""What an event may be. The controller tells all but the last three, which front ends find in replicas' figures."""


@wire_record
@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to a session, named by its key, or to a replica. `number` counts the controller's events.
    `to_replica_id` has the session from then on."""

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
    """What the controller tells those who watch. `recent` are those of the `sessions` that were used last, newest
    first; `states` says of each replica that is known what it is in. The next events come behind `cursor`."""

    sessions: int
    recent: tuple[LedgerEntry, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    events: tuple[ClusterEvent, ...] = ()
    cursor: str = ""
