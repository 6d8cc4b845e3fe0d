"""Puts Kedge's log records into Ray Serve's log, with its files, format and rotation.

Ray Serve itself writes only its own records. Its JSON has every attribute of a record, so also those that
CallFactsFilter adds.
"""

from __future__ import annotations

import logging
from typing import Any

from serving.logs.access_log import access_logger
from serving.logs.audit_log import audit_logger
from serving.logs.call_facts import CallFactsFilter
from serving.settings.record_args import LogsArgs

SERVE_LOGGER = "ray.serve"
OURS = ("cache", "controllers", "engine", "kedge", "serving")
"""The names of Kedge's top loggers."""


def deployment_options(args: LogsArgs) -> dict[str, Any]:
    """Logging options of Ray Serve's deployments. There are none if all settings are defaults: the config file may have
    a `logging_config` for Ray Serve, which an option of the deployment would replace."""
    return {} if args == LogsArgs() else {"logging_config": logging_options(args)}


def logging_options(args: LogsArgs) -> dict[str, Any]:
    """Ray Serve's `logging_config`. If Kedge logs every request, Ray Serve need not."""
    return {
        "encoding": args.format.upper(),
        "log_level": args.level,
        "additional_log_standard_attrs": ["name"] if args.format == "json" else [],
        "enable_access_log": args.access != "all",
    }


class IntoServeLog(logging.Handler):
    """Hands records to Ray Serve's logger, with the handlers that it has at that time."""

    def __init__(self, serve_logger: logging.Logger) -> None:
        super().__init__()
        self._serve_logger = serve_logger

    def emit(self, record: logging.LogRecord) -> None:
        self._serve_logger.handle(record)


def log_with_serve(args: LogsArgs) -> None:
    """Makes this process log to Ray Serve's log. Call it in the process of a front end or replica, after Ray Serve has
    set up its log."""
    serve_logger = logging.getLogger(SERVE_LOGGER)
    if not any(isinstance(each, CallFactsFilter) for each in serve_logger.filters):
        serve_logger.addFilter(CallFactsFilter())
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(args.level)
        if not any(isinstance(each, IntoServeLog) for each in logger.handlers):
            logger.addHandler(IntoServeLog(serve_logger))
            logger.propagate = False
    for logger in (audit_logger, access_logger):  # `level` does not turn these off
        logger.setLevel(logging.INFO)
