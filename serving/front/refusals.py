"""What a front end makes of a refused turn or call: try again, ask the controller, go on without the session, or
tell the client."""

from __future__ import annotations

from controllers.errors import (
    CapacityExceeded,
    ModelChanged,
    NoAnswer,
    Overloaded,
    SessionIsTree,
    StoreError,
    ToolsDiffer,
)
from engine.api import AdapterNotLoaded
from serving.watch.metrics import FailoverCause
from serving.wire.errors import (
    HISTORY_DIFFERS,
    REPLICA_LOST,
    SESSION_CLOSING,
    SESSION_MOVED,
    SESSION_NOT_FOUND,
    STALE_EPOCH,
    TURN_IN_FLIGHT,
    unavailable,
)
from serving.wire.turns import ErrorInfo
from serving.wire.versions import VERSION_MISMATCH

GONE = unavailable("the session's replica is gone and no other could take over in time")
LOST = unavailable("the replica was lost during the answer", REPLICA_LOST)
TOO_MANY_LOSSES = ErrorInfo(
    500, "too_many_losses", "the turn lost one replica after another: it may be what ends them"
)
ENGINE_STOPPED = "engine_stopped"
RETRIED_CODES = frozenset({STALE_EPOCH, SESSION_MOVED, ENGINE_STOPPED})
LET_GO = frozenset({STALE_EPOCH, SESSION_MOVED, SESSION_NOT_FOUND})
"""Errors of a replica that no longer has the session. The first time, the call may just have gone to the wrong one."""
LOG_AWAY = frozenset({StoreError.code, NoAnswer.code})
"""Nothing was begun, or it is not known whether it was: a call that can be repeated is retried until this is known."""
ADAPTER_AWAY = frozenset({AdapterNotLoaded.code, VERSION_MISMATCH})
"""The replica is older than this front end: it lacks the adapter, or does not know of adapters. An update replaces it
soon."""
REFUSED_BY_SESSION = ADAPTER_AWAY | frozenset(
    {
        TURN_IN_FLIGHT,
        SESSION_NOT_FOUND,
        SESSION_CLOSING,
        SESSION_MOVED,
        STALE_EPOCH,
        REPLICA_LOST,  # also of a turn that another one has overtaken
        Overloaded.code,  # also of a tenant that may have no more sessions
        SessionIsTree.code,
        CapacityExceeded.code,
        ToolsDiffer.code,
        ModelChanged.code,
        HISTORY_DIFFERS,
    }
)
"""Errors of a turn that its session does not take, and that may run without it."""
CLIENTS_FAULTS = frozenset({400, 413})


def failover_cause(failure: ErrorInfo) -> FailoverCause:
    lost = failure is GONE or failure is LOST or failure.code == ENGINE_STOPPED
    return FailoverCause.LOST if lost else FailoverCause.REFUSED


def is_retried(refusal: ErrorInfo, failed: bool, *, in_mid_stream: bool = False) -> bool:
    """Whether to try again. A turn in flight may be what is left of a failed attempt; if none failed, the refusal goes
    to the client. A turn in mid-stream also waits for an overloaded replica, and for its adapter."""
    if refusal.code in RETRIED_CODES or refusal.code == "replica_unavailable":
        return True
    if in_mid_stream and (refusal.code == "overloaded" or refusal.code in ADAPTER_AWAY):
        return True
    return failed and refusal.code == TURN_IN_FLIGHT
