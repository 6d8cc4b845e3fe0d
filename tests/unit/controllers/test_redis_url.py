from __future__ import annotations

import pytest

from controllers.redis_url import SentinelAddress, sentinel_address


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
    with pytest.raises(ValueError, match=r"expected redis\+sentinel://|not of the form redis\+sentinel://"):
        sentinel_address(f"redis+sentinel://{rest}")
