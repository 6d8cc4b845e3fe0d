"""Maps every typed error of the engine and the controllers to the `ErrorInfo` that a client gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from controllers.errors import ControllerError, Overloaded
from engine.api import EngineError, EngineOverloaded, InvalidRequest
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent

STATUS_BY_CODE = MappingProxyType(
    {
        "invalid_request": 400,
        "context_length_exceeded": 400,
        "request_too_large": 400,
        "adapter_not_loaded": 503,
        "session_busy": 409,
        "engine_stopped": 503,
        "constraint_failed": 400,
        "step_failed": 500,
        "session_not_found": 404,
        "session_exists": 400,
        "turn_in_flight": 409,
        "turn_not_in_flight": 409,
        "turn_differs": 409,
        "session_is_tree": 409,
        "history_differs": 409,
        "ambiguous_history": 409,
        "session_closing": 409,
        "stale_epoch": 409,
        "session_moved": 409,
        "invalid_rewind": 400,
        "invalid_fork": 400,
        "invalid_move": 400,
        "tools_differ": 400,
        "model_changed": 409,
        "session_capacity_exceeded": 400,
        "no_replica": 503,
        "overloaded": 429,
        "idempotency_conflict": 409,
        "store_unavailable": 503,
        "settings_refused": 409,
        "controller_unavailable": 503,
    }
)
STALE_EPOCH = "stale_epoch"
SESSION_MOVED = "session_moved"
SESSION_NOT_FOUND = "session_not_found"
HISTORY_DIFFERS = "history_differs"
SESSION_CLOSING = "session_closing"
TURN_IN_FLIGHT = "turn_in_flight"
TURN_DIFFERS = "turn_differs"
ANOTHERS_TURN = frozenset({TURN_IN_FLIGHT, TURN_DIFFERS})
"""Errors that say that another turn took the place of this one."""
REPLICA_LOST = "replica_lost"
DEFAULT_RETRY_AFTER_S = 1.0


def error_info(error: BaseException) -> ErrorInfo:
    """The error as data. An untyped error becomes an internal error, and its text stays in the log."""
    if isinstance(error, ServiceError):
        return error.info
    if isinstance(error, EngineError | ControllerError):
        status = STATUS_BY_CODE.get(error.code, 400 if isinstance(error, InvalidRequest) else 500)
        return ErrorInfo(
            status=status,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_s=_retry_after_s(error, status),
        )
    return ErrorInfo(500, "internal_error", f"internal error ({type(error).__name__})")


@contextmanager
def told_to_clients() -> Iterator[None]:
    """Raises a ControllerError as the ServiceError that a client gets."""
    try:
        yield
    except ControllerError as error:
        raise ServiceError(error_info(error)) from error


def error_event(error: BaseException) -> TurnEvent:
    """The last event of a turn that failed."""
    return TurnEvent(error=error_info(error))


def unavailable(message: str, code: str = "replica_unavailable") -> ErrorInfo:
    """A 503 with a time after which to retry."""
    return ErrorInfo(503, code, message, retry_after_s=DEFAULT_RETRY_AFTER_S)


def _retry_after_s(error: EngineError | ControllerError, status: int) -> float | None:
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        return error.retry_after_s
    return DEFAULT_RETRY_AFTER_S if status == 503 or isinstance(error, EngineOverloaded) else None
