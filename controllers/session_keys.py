"""Session keys: the names that the cluster uses for sessions. No two tenants' sessions can have the same key.

A key is the tenant, a space and the id that the client knows. For the tenant "" it is the id alone. Tenants and ids
contain no space; `session_key` refuses those that do. Ledger, log and replicas know sessions only by their keys, so no
call can reach a session of another tenant because both use the same id, or because an id looks like a key.
"""

from __future__ import annotations

import secrets

from controllers.errors import SessionNotFound

_BETWEEN = " "
_ID_BYTES = 16


def new_session_id() -> str:
    """A random id for a session whose client names none."""
    return secrets.token_urlsafe(_ID_BYTES)


def session_key(tenant: str, session_id: str) -> str:
    """The key of the tenant's session. `session_id` may already be a key of the tenant.

    Raises SessionNotFound for any other id with a space, and for a tenant with one: the result could be the key of
    another tenant's session."""
    if _BETWEEN not in tenant:
        if _BETWEEN not in session_id:
            return tenant + _BETWEEN + session_id if tenant else session_id
        if tenant and tenant_in(session_id) == tenant:
            return session_id
    raise SessionNotFound("no session has this name: it contains a space")


def tenant_in(key: str) -> str:
    return key.rpartition(_BETWEEN)[0]


def id_in(key: str) -> str:
    """The session's id as its client knows it."""
    return key.rpartition(_BETWEEN)[2]


def named(key: str) -> str:
    """How messages to a client name the session."""
    return f"session {id_in(key)!r}"
