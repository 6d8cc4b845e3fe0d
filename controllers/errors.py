"""Typed errors of turns, ownership and the session log. All of them can be pickled, since they cross processes."""

from __future__ import annotations


class ControllerError(Exception):
    """Base of every error that the controllers answer with.

    `code` is stable and machine readable. `param` names the request field at fault, if there is one; its default is the
    class's `field`. No class may define `param` itself: Ray raises a subclass of this class, which asks the original
    error only for attributes that the class lacks.
    """

    code: str = "controller_error"
    field: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = self.field if param is None else param


class SessionNotFound(ControllerError):
    """No such session, or it belongs to another tenant."""

    code = "session_not_found"


class SessionExists(ControllerError):
    """A session of that id is open already."""

    code = "session_exists"


class TurnInFlight(ControllerError):
    """The session has a turn in flight; there is at most one."""

    code = "turn_in_flight"
    field = "session_id"


class TurnDiffers(ControllerError):
    """The turn's number in its session would not be the one that the client expects."""

    code = "turn_differs"
    field = "x-session-turn"


class SessionIsTree(ControllerError):
    """The session is a tree of requests, each of which continues another one."""

    code = "session_is_tree"
    field = "session_id"


class TurnNotInFlight(ControllerError):
    """The turn has already been committed or aborted: a turn ends exactly once."""

    code = "turn_not_in_flight"


class SessionClosing(ControllerError):
    """The session is being closed and takes no more turns."""

    code = "session_closing"
    field = "session_id"


class StaleEpoch(ControllerError):
    """The caller's view of the session is out of date: it has moved to another owner, or its log has further turns."""

    code = "stale_epoch"


class SessionTakenOver(StaleEpoch):
    """Another cluster on the same session log has claimed the session."""


class SessionMoved(ControllerError):
    """When this turn began, its session moved to another owner with a better place for it."""

    code = "session_moved"


class InvalidRewind(ControllerError):
    """The rewind offset is not within the committed history."""

    code = "invalid_rewind"
    field = "offset"


class InvalidFork(ControllerError):
    """The session cannot be forked there: its committed history is shorter."""

    code = "invalid_fork"
    field = "length"


class InvalidMove(ControllerError):
    """There is no such replica to move the session to."""

    code = "invalid_move"
    field = "to"


class CapacityExceeded(ControllerError):
    """The session would grow past the capacity it was opened with."""

    code = "session_capacity_exceeded"
    field = "prompt"


class ToolsDiffer(ControllerError):
    """The turn names tools that differ from those that the session's history begins with."""

    code = "tools_differ"
    field = "tools"


class ModelChanged(ControllerError):
    """The tokenizer or vocabulary of the served model differs from that of the model that made the session's
    history."""

    code = "model_changed"
    field = "session_id"


class NoReplica(ControllerError):
    """No live replica can own the session."""

    code = "no_replica"


class InvalidTimeout(ControllerError):
    """A session was to be opened with a longer idle timeout than the operator allows."""

    code = "invalid_request"
    field = "timeout_s"


class Overloaded(ControllerError):
    """A limit is reached. `retry_after_s` estimates after how long a retry makes sense."""

    code = "overloaded"

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class IdempotencyConflict(ControllerError):
    """The idempotency key has been used for a different request, or for a turn whose answer was deleted since."""

    code = "idempotency_conflict"
    field = "idempotency_key"


class SettingsRefused(ControllerError):
    """A deployment has a setting that a running controller cannot change. `param` is the setting's key."""

    code = "settings_refused"


class StoreError(ControllerError):
    """The session log cannot be opened, read or written. The log may still hold the change, if only its answer was
    lost. So this error is no refusal, and calls that may be repeated are repeated.

    `detail` is for the logs and not for clients: paths, addresses, messages of libraries."""

    code = "store_unavailable"

    def __init__(self, message: str, param: str | None = None, detail: str | None = None) -> None:
        super().__init__(message, param)
        self.detail = detail

    def __str__(self) -> str:
        return self.message if self.detail is None else f"{self.message} ({self.detail})"


class NoAnswer(StoreError):
    """The cluster controller did not answer in time. It may have done what it was asked, or not."""

    code = "controller_unavailable"
