"""Addresses of Redis. `redis+sentinel://` says which Sentinels to ask, and for the master of which service. Errors say
nothing of an address: it may have a password, and one with a slash is not seen as such."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

SENTINEL_SCHEME = "redis+sentinel"
SENTINEL_PORT = 26379
SERVER_SCHEMES = ("redis", "rediss")
SERVER_FORM = "redis://host:port/db, with numbers for port and db,"
FORM = f"{SENTINEL_SCHEME}://host:port,host:port/service or {SENTINEL_SCHEME}://user@host:port/service/db"


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A parsed address. `sentinels` are hosts and ports. `username` and `db` are those of Redis itself."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    username: str | None = None


def check_redis_url(url: str) -> None:
    """Raises a ValueError that says what was expected if no Redis and no Sentinels can have this address. redis-py
    itself takes database 0 where it finds no number."""
    if sentinel_address(url) is not None:
        return
    parts = urlsplit(url)
    numbers = parse_qs(parts.query, keep_blank_values=True).get("db", [])
    if parts.scheme in SERVER_SCHEMES and (db := parts.path.strip("/")):
        numbers.append(db)
    if not (_has_a_good_port(parts) and all(number.isdecimal() for number in numbers)):
        raise ValueError(f"{SERVER_FORM} was expected")


def sentinel_address(url: str) -> SentinelAddress | None:
    """Parses the URL. None if it has another scheme. Raises a ValueError that says what was expected."""
    parts = urlsplit(url)
    if parts.scheme != SENTINEL_SCHEME:
        return None
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.removeprefix("/").partition("/")
    if not service or parts.query or parts.fragment or (db and not db.isdecimal()):
        raise ValueError(f"{FORM} was expected")
    return SentinelAddress(
        tuple(_host_and_port(host) for host in hosts.split(",")),
        unquote(service),
        int(db or 0),
        unquote(user) or None,
    )


def _has_a_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ValueError(f"a Sentinel is no host:port: {FORM} was expected")
    return host, port or SENTINEL_PORT
