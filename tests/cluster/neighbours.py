"""Sessions that share a replica."""

from __future__ import annotations

import httpx
from served_cluster import ServedCluster
from session_client import Conversation


def neighbours(cluster: ServedCluster, client: httpx.Client, count: int) -> tuple[str, list[Conversation]]:
    """A replica and `count` new sessions that it owns."""
    sessions = [Conversation.open(client) for _ in range(2 * count - 1)]
    by_owner: dict[str, list[Conversation]] = {}
    owners = cluster.sessions()
    for session in sessions:
        by_owner.setdefault(owners[session.session_id]["replica_id"], []).append(session)
    owner, chosen = max(by_owner.items(), key=lambda item: len(item[1]))
    for session in sessions:
        if session not in chosen[:count]:
            session.close()
    return owner, chosen[:count]
