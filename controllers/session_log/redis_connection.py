"""A client of the Redis that the settings name. For each connection, Sentinels name the master, if the URL has any."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from controllers.session_log.redis_url import sentinel_address
from controllers.settings import REDIS_PASSWORD, REDIS_SENTINEL_PASSWORD, RedisLogSettings

Connect = Callable[[RedisLogSettings, float], redis.Redis]
"""Makes a client. The second argument is the timeout for each answer, in seconds."""

SENTINEL_TIMEOUT_S = 0.2
"""Timeout for each Sentinel. The controller does nothing else while it asks one."""


def connect_redis(settings: RedisLogSettings, timeout_s: float, **options: Any) -> redis.Redis:
    """Makes a client, which sends nothing yet. `timeout_s` is the timeout for each answer of Redis. `options` are
    redis-py's, for its connections to Redis itself. Raises ValueError if the URL is not valid.

    After a failover the first call fails on the old connection. The next connection is to the new master.
    """
    password = os.environ.get(REDIS_PASSWORD)
    # One retry, for a connection that was closed meanwhile. It is safe because every change may be made twice.
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
