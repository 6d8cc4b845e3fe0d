"""The ids that requests of trees have inside the cluster. What trees are: serving/front/api/sessions/trees.py."""

from __future__ import annotations

BEHIND_TREE = "\x1f"
"""Separates a tree's name from a request's. No name that a client gives contains it."""


def node_id(tree_id: str, rid: str) -> str:
    """The session id of a tree's request inside the cluster."""
    return f"{tree_id}{BEHIND_TREE}{rid}"


def tree_and_request(session_id: str) -> tuple[str, str | None]:
    """The session id as its client knows it, and the request; None if the session is not a request of a tree."""
    tree_id, behind, rid = session_id.partition(BEHIND_TREE)
    return tree_id, rid if behind else None
