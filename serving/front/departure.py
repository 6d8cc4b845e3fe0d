"""Whether this front end is about to be stopped. Ray Serve tells the application only once all calls have ended."""

from __future__ import annotations

from typing import Protocol

LOOK_INTERVAL_S = 5.0


class Listing(Protocol):
    """The list of running front ends. Implemented by Siblings."""

    async def running(self) -> set[str] | None: ...


class Departure:
    """Notices that Serve is taking this front end away: its id is no longer in the list of running front ends, not even
    in its own copy of the list."""

    def __init__(self, listing: Listing, ingress_id: str) -> None:
        self._listing = listing
        self._ingress_id = ingress_id
        self.was_listed = False
        """A front end that has never been listed is still starting."""

    async def is_near(self) -> bool:
        running = await self._listing.running()
        if running is None:
            return False
        listed = self._ingress_id in running
        self.was_listed |= listed
        return self.was_listed and not listed
