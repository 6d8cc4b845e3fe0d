from __future__ import annotations

import pytest

from controllers.session_log.redis_url import SentinelAddress, check_redis_url, sentinel_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost/0", None),
        ("unix:///a,b/redis.sock", None),
        ("redis+sentinel://a/mymaster", SentinelAddress((("a", 26379),), "mymaster")),
        (
            "redis+sentinel://me@a:1,b,[::1]:3/my%20master/2",
            SentinelAddress((("a", 1), ("b", 26379), ("::1", 3)), "my master", 2, "me"),
        ),
    ],
)
def test_addresses(url: str, address: SentinelAddress | None) -> None:
    assert sentinel_address(url) == address


@pytest.mark.parametrize(
    "rest", ["", "a", "a/", "/m", "a,/m", "a:x/m", "a:99999/m", "a/m/x", "a/m/1/2", "a/m?db=1", "a/m#1"]
)
def test_others_are_refused_with_what_was_expected(rest: str) -> None:
    with pytest.raises(
        ValueError, match=r"redis\+sentinel://host:port,host:port/service or .* was expected$"
    ):
        sentinel_address(f"redis+sentinel://{rest}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://host:6379/",
        "redis://me@[::1]:6379/15",
        "rediss://host/2?socket_timeout=1",
        "redis://host?db=3",
        "unix:///var/run/redis.sock?db=1",
        "unix://redis.sock",
        "redis+sentinel://a:1,b/mymaster/2",
    ],
)
def test_addresses_that_lead_to_a_database(url: str) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:abc/1",
        "redis://host:99999/1",
        "redis://host:0",
        "redis://host:6379/kedge",
        "rediss://host/1/2",
        "redis://host/-1",
        "redis://host?db=kedge",
        "unix:///redis.sock?db=",
    ],
)
def test_addresses_that_lead_nowhere_or_to_another_database_are_refused(url: str) -> None:
    """redis-py took database 0 for one that is no number. A port that is none was found by the controller's start."""
    with pytest.raises(ValueError, match=r"^redis://host:port/db, .* was expected$"):
        check_redis_url(url)


@pytest.mark.parametrize("rest", ["a:x/m", "a/m/x"])
def test_addresses_of_sentinels_are_checked_too(rest: str) -> None:
    with pytest.raises(ValueError, match=r"redis\+sentinel://"):
        check_redis_url(f"redis+sentinel://{rest}")
