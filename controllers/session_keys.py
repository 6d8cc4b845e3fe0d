"""What the cluster calls a tenant's session: one name that no other tenant's session can have.

A key is the tenant, a space and the id that the client knows; of the tenant "" the id alone. Neither of the two has a
space in it. Ledger, log and replicas know sessions by their keys only, so none of their calls can reach a session of
another tenant by a name that both use.
"""

from __future__ import annotations

_BETWEEN = " "


def session_key(tenant: str, session_id: str) -> str:
    """`session_id` may be a key of the tenant already."""
    if not tenant or tenant_in(session_id) == tenant:
        return session_id
    return tenant + _BETWEEN + session_id


def tenant_in(key: str) -> str:
    return key.rpartition(_BETWEEN)[0]


def id_in(key: str) -> str:
    """The session's id as its client knows it."""
    return key.rpartition(_BETWEEN)[2]


def named(key: str) -> str:
    """The session in a message to its client."""
    return f"session {id_in(key)!r}"
