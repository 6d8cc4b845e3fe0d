"""A client of the Redis that the settings name: one server, or the master that Sentinels name at each connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from controllers.redis_url import sentinel_address
from controllers.settings import REDIS_PASSWORD, REDIS_SENTINEL_PASSWORD, RedisLogSettings

Connect = Callable[[RedisLogSettings, float], redis.Redis]
"""Makes a client, which has so many seconds for each answer."""

SENTINEL_TIMEOUT_S = 0.2
"""For each Sentinel: while one is asked, the controller does nothing else."""


def connect_redis(settings: RedisLogSettings, timeout_s: float, **options: Any) -> redis.Redis:
    """Nothing is sent yet. `timeout_s` is for each answer of Redis. `options` are redis-py's, for its connections to
    Redis itself. Raises ValueError if the URL is not one.

    After a failover the first answer is an error of the old connection; the next connection is to the new master.
    """
    password = os.environ.get(REDIS_PASSWORD)
    # For a connection that was closed meanwhile: every change may be made twice.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    address = sentinel_address(settings.url)
    if address is None:
        client: redis.Redis = redis.Redis.from_url(
            settings.url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=retry,
            **options,
        )
        return client
    sentinels = Sentinel(
        address.sentinels,
        sentinel_kwargs={
            "password": os.environ.get(REDIS_SENTINEL_PASSWORD),
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        },
    )
    master: redis.Redis = sentinels.master_for(
        address.service,
        db=address.db,
        username=address.username,
        password=password,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=retry,
        **options,
    )
    return master
