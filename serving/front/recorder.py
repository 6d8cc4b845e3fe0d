"""What a front end logs and traces of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI

from serving.front.api.access import OPEN_PATHS
from serving.logs.access_log import RequestsKnown
from serving.settings.record_args import LogsArgs

if TYPE_CHECKING:
    from serving.trace.spans import Spans


NOTHING_LOGGED = LogsArgs()


@dataclass(frozen=True, slots=True)
class Recorder:
    """`spans` None: nothing is traced. `tells_id`: Kedge adds the request's id to replies. On Ray Serve's port, Serve
    does that."""

    logs: LogsArgs = NOTHING_LOGGED
    spans: Spans | None = None
    tells_id: bool = True

    def install(self, app: FastAPI) -> None:
        """Adds the recording middleware around all other middleware."""
        if self.spans is not None:
            from serving.trace.requests import RequestsTraced

            app.add_middleware(RequestsTraced, spans=self.spans, passed_over=OPEN_PATHS)
        app.add_middleware(RequestsKnown, args=self.logs, tells_id=self.tells_id)
