"""How the metrics count a turn that failed."""

from __future__ import annotations

from http import HTTPStatus

from controllers.errors import SessionMoved, StaleEpoch
from serving.wire.errors import error_info


def outcome_of(failure: BaseException) -> str:
    """The outcome of a turn, by the status that the client gets: the client's fault ("refused"), overload,
    unavailability, or a fault of the server ("error")."""
    if isinstance(failure, SessionMoved):
        return "moved"
    if isinstance(failure, StaleEpoch):
        return "stale"
    match error_info(failure).status:
        case HTTPStatus.TOO_MANY_REQUESTS:
            return "overloaded"
        case HTTPStatus.SERVICE_UNAVAILABLE:
            return "unavailable"
        case status:
            return "refused" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "error"
