"""Commits finished turns to the session log, and retries while the log or the controller is away.

A commit may be sent any number of times: the log knows the last turn that it has. So a commit is retried until an
answer comes or patience is over. Until then the turn stays pending here, with its KV.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress

from controllers.errors import ControllerError, StoreError
from controllers.records import TurnRecord
from serving.watch.metrics import ReplicaMetrics
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
"""Together with the time the controller needs to see that its log is back, all turns continue within a second."""


class TurnCommits:
    """Commits turns. `patience_s` bounds each commit, by the event loop's time. Used on the replica's event loop
    only."""

    def __init__(self, controller: ControllerCalls, metrics: ReplicaMetrics, *, patience_s: float) -> None:
        self._controller = controller
        self._metrics = metrics
        self._patience_s = patience_s
        self._log_is_back = asyncio.Event()

    async def commit(self, record: TurnRecord) -> None:
        """Returns once the log holds `record`.

        Raises the ControllerError with which the controller or its log refuses the record. Raises StoreError once
        patience is over: the log may hold the record or not.
        """
        loop = asyncio.get_running_loop()
        began_s, tries, reason = loop.time(), 1, "no answer"
        try:
            with ExitStack() as counted:
                counted.enter_context(self._metrics.commit_pending())
                async with asyncio.timeout_at(began_s + self._patience_s):
                    while (failure := await self._try(record)) is not None:
                        reason = _reason(failure)
                        if tries == 1:
                            logger.warning(
                                "session %s: a turn waits for the log: %s", record.session_id, failure
                            )
                            counted.enter_context(self._metrics.commit_failing())
                        await self._pause(failure, tries)
                        self._metrics.commit_retried()
                        tries += 1
        except TimeoutError:
            self._metrics.committed(loop.time() - began_s)
            raise StoreError(
                f"the turn was not committed within {self._patience_s:g} s ({reason}). The log may have it"
                " nevertheless: sent again with the same idempotency key it runs once"
            ) from None
        waited_s = loop.time() - began_s
        self._metrics.committed(waited_s)
        if tries > 1:
            logger.info("session %s: committed after %.1f s, %d tries", record.session_id, waited_s, tries)

    async def _try(self, record: TurnRecord) -> Exception | None:
        """Returns None if the log now holds the record, or the failure if the outcome is unknown. Raises a refusal."""
        try:
            await self._controller.commit_turn(record)
        except StoreError as error:
            return error
        except ControllerError:
            raise
        except Exception as error:  # in transport, or in the controller itself
            logger.exception("session %s: the commit failed", record.session_id)
            return error
        self._log_is_back.set()
        self._log_is_back = asyncio.Event()
        return None

    async def _pause(self, failure: Exception, tries: int) -> None:
        """Pauses longer after each try. After a failure of the log, the pause ends as soon as any turn is committed."""
        pause_s = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S)
        if not isinstance(failure, StoreError):
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._log_is_back.wait()


def _reason(failure: Exception) -> str:
    """The reason as a client may see it. Of an untyped error it names only the type: its text is for the log."""
    return (
        failure.message
        if isinstance(failure, ControllerError)
        else f"internal error ({type(failure).__name__})"
    )
