"""A front end knows that it is to go once it is no longer in the list of running front ends."""

from __future__ import annotations

from serving.front.departure import Departure


class Listed:
    """The list of running front ends, as the test sets it."""

    def __init__(self) -> None:
        self.now: set[str] | None = {"other"}

    async def running(self) -> set[str] | None:
        return self.now


async def test_one_that_was_listed_and_is_no_more_is_to_go() -> None:
    listed = Listed()
    departure = Departure(listed, "me")
    assert not await departure.is_near(), "it is on its way in"
    for now, near in (
        ({"me", "other"}, False),
        (None, False),
        ({"other"}, True),
        (set(), True),
        ({"me"}, False),
    ):
        listed.now = now
        assert await departure.is_near() is near
