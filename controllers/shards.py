"""Shards: several controllers, each a whole one for the sessions whose key hashes to its number.

Each shard has an actor, a ledger and a log of its own. Who calls a shard knows from the session's key which one it is.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from controllers.settings import ClusterSettings, Deployment

_DIGEST_BYTES = 8


def shard_of(key: str, num_shards: int) -> int:
    """The shard that has the session of this key. Never changes, since logs depend on it."""
    if num_shards == 1:
        return 0
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big") % num_shards


def shard_name(name: str, shard: int) -> str:
    """The name of the shard's actor. The first one has the name of a controller that is the only one."""
    return name if shard == 0 else f"{name}-{shard}"


def deployment_of_shard(deployment: Deployment, shard: int) -> Deployment:
    """What is announced to one shard: its own log, and its share of what the cluster may have and do."""
    log = replace(deployment.log, shard=shard)
    return replace(deployment, log=log, settings=_share(deployment.settings, log.shards))


def _share(settings: ClusterSettings, num_shards: int) -> ClusterSettings:
    """The shard's share of the limits, rounded up."""
    if num_shards == 1:
        return settings
    rebalancing = settings.rebalancing
    if rebalancing is not None:
        rebalancing = replace(rebalancing, shards=num_shards)
    sessions, tokens = settings.tenant_sessions, settings.tenant_history_tokens
    return replace(
        settings,
        rebalancing=rebalancing,
        max_sessions=_part(settings.max_sessions, num_shards),
        tenant_sessions=None if sessions is None else _part(sessions, num_shards),
        tenant_history_tokens=None if tokens is None else _part(tokens, num_shards),
    )


def _part(limit: int, num_shards: int) -> int:
    return -(-limit // num_shards)
