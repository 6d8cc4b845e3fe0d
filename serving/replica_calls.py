"""Calls from an ingress to engine replicas: pinned streams, pinned calls, broadcasts. Every wait is bounded.

The only place that knows Ray Serve's handles and their exceptions. A replica that cannot be reached, before or
during a call, is `ReplicaGone`; whether anything was delivered is for the caller to know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serving.routing_errors import ReplicaGone
from serving.turns import TurnCall, TurnEvent

logger = logging.getLogger(__name__)

ANY_REPLICA = ""
LOST = (RayActorError, TaskCancelledError, RequestCancelledError, DeploymentUnavailableError)


class ReplicaCalls:
    """`silence_timeout_s`: a streaming replica sends a sign of life more often than that, or counts as lost."""

    def __init__(self, handle: DeploymentHandle, *, silence_timeout_s: float, call_timeout_s: float) -> None:
        # By value over gRPC: measured faster than object references, for streams of small batches above all.
        self._stream = handle.options(stream=True, method_name="turn", _by_reference=False)
        self._unary = handle.options(_by_reference=False)
        self._handle = handle
        self._silence_timeout_s = silence_timeout_s
        self._call_timeout_s = call_timeout_s

    @asynccontextmanager
    async def turn(
        self, replica_id: str, call: TurnCall, epoch: int | None
    ) -> AsyncIterator[AsyncIterator[list[TurnEvent]]]:
        """A turn on `replica_id` (ANY_REPLICA: the less loaded). Leaving the context early cancels it there."""
        response = self._stream.options(session_id=replica_id).remote(call, epoch)
        ended = False

        async def batches() -> AsyncGenerator[list[TurnEvent], None]:
            nonlocal ended
            while True:
                try:
                    async with asyncio.timeout(self._silence_timeout_s):
                        batch: list[TurnEvent] = await anext(response)
                except StopAsyncIteration:
                    ended = True
                    return
                except (*LOST, TimeoutError) as error:
                    raise ReplicaGone(replica_id) from error
                if batch:
                    ended = batch[-1].finish is not None or batch[-1].error is not None
                    yield batch

        async with aclosing(batches()) as stream:
            try:
                yield stream
            finally:
                if not ended:
                    _cancel(response)

    async def call(self, replica_id: str, method: str, *args: Any) -> Any:
        """One pinned call. Raises ReplicaGone if the replica does not answer in time."""
        response = self._unary.options(session_id=replica_id, method_name=method).remote(*args)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await response
        except (*LOST, TimeoutError) as error:
            _cancel(response)
            raise ReplicaGone(replica_id) from error

    async def broadcast(self, method: str, *args: Any) -> list[Any]:
        """The answers of all replicas that answer in time, in no order."""
        try:
            responses = self._handle.broadcast(method, *args)
            answers = await responses.results_async(timeout_s=self._call_timeout_s, return_exceptions=True)
        except (*LOST, TimeoutError) as error:
            logger.warning("no replica answered %s: %s", method, error)
            return []
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.warning("a replica did not answer %s: %s", method, answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _cancel(response: Any) -> None:
    """Serve's `cancel` raises what the call itself failed with; there is nothing to cancel then."""
    with suppress(Exception):
        response.cancel()
