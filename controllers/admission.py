"""Decides whether a session may be opened. Pure. (Replicas admit turns, see serving/replica/tenant_load.py.)"""

from __future__ import annotations

from controllers.errors import InvalidTimeout, Overloaded
from controllers.ownership import TenantUse
from controllers.settings import ClusterSettings

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


def admit_session(sessions: int, max_sessions: int, expires_in_s: float | None = None) -> None:
    """Allows one more session. `expires_in_s`: seconds until an idle session expires (None: none will).

    Raises Overloaded with an estimate of when there will be room.
    """
    if sessions < max_sessions:
        return
    wait_s = MAX_RETRY_AFTER_S if expires_in_s is None else expires_in_s
    raise Overloaded(f"{sessions} sessions are open, the limit", retry_after_s=_bounded(wait_s))


def admit_timeout(timeout_s: float | None, settings: ClusterSettings) -> None:
    """Raises InvalidTimeout if the timeout is longer than the operator allows sessions to idle."""
    if timeout_s is not None and timeout_s > settings.max_timeout_s:
        raise InvalidTimeout(
            f"sessions may idle for {settings.max_timeout_s:g} s at most, not for {timeout_s:g} s"
        )


def admit_to_tenant(use: TenantUse, settings: ClusterSettings, *, copied_tokens: int = 0) -> None:
    """Allows the tenant one more session, whose history begins with `copied_tokens` tokens. Raises Overloaded."""
    most = settings.tenant_sessions
    if most is not None and use.sessions >= most:
        message = f"this tenant has {use.sessions} sessions open, its limit: close some, or wait until they idle out"
        raise Overloaded(message, retry_after_s=MAX_RETRY_AFTER_S)
    most = settings.tenant_history_tokens
    if most is not None and use.tokens + copied_tokens > most:
        message = f"the histories of this tenant's sessions have {use.tokens} tokens; {most} is its limit: close some"
        raise Overloaded(message, retry_after_s=MAX_RETRY_AFTER_S)


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
