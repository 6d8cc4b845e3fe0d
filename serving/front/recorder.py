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
    """`spans` None: nothing is traced. `tells_id`: replies are to have the request's id, which Ray Serve gives those
    that it answers."""

    logs: LogsArgs = NOTHING_LOGGED
    spans: Spans | None = None
    tells_id: bool = True

    def install(self, app: FastAPI) -> None:
        """Around all other middleware."""
        if self.spans is not None:
            from serving.trace.requests import RequestsTraced

            app.add_middleware(RequestsTraced, spans=self.spans, passed_over=OPEN_PATHS)
        app.add_middleware(RequestsKnown, args=self.logs, tells_id=self.tells_id)
