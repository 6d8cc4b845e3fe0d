"""Calls from an ingress to all ingresses: only each ingress itself knows its clients' turns and its own counts."""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)


class Siblings:
    """All ingresses, this one included. `handle` is that of their deployment. No call waits longer than `timeout_s`."""

    def __init__(self, handle: DeploymentHandle, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """What the ingresses answer, this one included. All live ingresses receive the call. If one of them does not
        answer in time, the result is empty."""
        try:
            answers = await self._handle.broadcast(method, *args).results_async(
                timeout_s=self._timeout_s, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError) as error:
            logger.warning("not all ingresses answered %s: %r", method, error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def running(self) -> set[str] | None:
        """Ids of the ingresses that Serve sends calls to; None if one of them does not answer."""
        try:
            answers = await self._handle.broadcast("describe").results_async(timeout_s=self._timeout_s)
        except DeploymentUnavailableError:
            return set()
        except Exception:  # whatever a call raises there, nothing is known
            return None
        return {answer["ingress_id"] for answer in answers}
