"""Whether this front end is to go. Ray Serve tells the user's part of the process only once all calls have ended."""

from __future__ import annotations

from typing import Protocol

LOOK_INTERVAL_S = 5.0


class Listing(Protocol):
    """Implemented by Siblings."""

    async def running(self) -> set[str] | None: ...


class Departure:
    """One that Serve takes away leaves the list of those that calls are sent to, and its own copy of the list, too."""

    def __init__(self, listing: Listing, ingress_id: str) -> None:
        self._listing = listing
        self._ingress_id = ingress_id
        self.was_listed = False
        """One that has never been listed is on its way in."""

    async def is_near(self) -> bool:
        running = await self._listing.running()
        if running is None:
            return False
        listed = self._ingress_id in running
        self.was_listed |= listed
        return self.was_listed and not listed
