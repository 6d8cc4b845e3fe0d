"""Kedge's records in Ray Serve's log: its files, format and rotation. Ray Serve itself writes its own records only.

Ray Serve's JSON has every attribute of a record, so what CallFactsFilter adds is in it.
"""

from __future__ import annotations

import logging
from typing import Any

from serving.logs.call_facts import CallFactsFilter
from serving.settings.record_args import LogsArgs

SERVE_LOGGER = "ray.serve"
OURS = ("cache", "controllers", "engine", "kedge", "serving")
"""Where the names of Kedge's loggers begin."""


def deployment_options(args: LogsArgs) -> dict[str, Any]:
    """Options of Ray Serve's deployments. None where nothing is asked for: the config file may have a `logging_config`
    of Ray Serve's, which one of the deployment would replace."""
    return {} if args == LogsArgs() else {"logging_config": logging_options(args)}


def logging_options(args: LogsArgs) -> dict[str, Any]:
    """Ray Serve's `logging_config`. Where requests have a line of Kedge's they need none of Ray's."""
    return {
        "encoding": args.format.upper(),
        "log_level": args.level,
        "additional_log_standard_attrs": ["name"] if args.format == "json" else [],
        "enable_access_log": args.access != "all",
    }


class IntoServeLog(logging.Handler):
    """Hands records to Ray Serve's logger, whatever handlers that has by then."""

    def __init__(self, serve_logger: logging.Logger) -> None:
        super().__init__()
        self._serve_logger = serve_logger

    def emit(self, record: logging.LogRecord) -> None:
        self._serve_logger.handle(record)


def log_with_serve(args: LogsArgs) -> None:
    """Call it once in the process of a front end or replica, after Ray Serve has set up its log."""
    serve_logger = logging.getLogger(SERVE_LOGGER)
    if not any(isinstance(each, CallFactsFilter) for each in serve_logger.filters):
        serve_logger.addFilter(CallFactsFilter())
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(args.level)
        if not any(isinstance(each, IntoServeLog) for each in logger.handlers):
            logger.addHandler(IntoServeLog(serve_logger))
            logger.propagate = False
