"""The ids that requests of trees have inside the cluster, and what clients are told instead. What trees are:
serving/front/api/sessions/trees.py."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from serving.wire.turns import SessionInfo

BEHIND_TREE = "\x1f"
"""Separates a tree's name from a request's. No name that a client gives contains it."""


def node_id(tree_id: str, rid: str) -> str:
    """The session id of a tree's request inside the cluster."""
    return f"{tree_id}{BEHIND_TREE}{rid}"


def tree_and_request(session_id: str) -> tuple[str, str | None]:
    """The session id as its client knows it, and the request; None if the session is not a request of a tree."""
    tree_id, behind, rid = session_id.partition(BEHIND_TREE)
    return tree_id, rid if behind else None


def told_session(session: SessionInfo) -> dict[str, Any]:
    """The session as its client knows it. `rid` is null if it is not a request of a tree."""
    session_id, rid = tree_and_request(session.session_id)
    return asdict(session) | {"session_id": session_id, "rid": rid}
