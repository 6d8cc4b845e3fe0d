"""The audit log, for operators to look up later who was refused and what was done. It has its own logger."""

from __future__ import annotations

import json
import logging
import re

audit_logger = logging.getLogger("kedge.audit")

_PLAIN = re.compile(r"[!#-~]+")
"""Values that are written as they are: visible ASCII without quotes. All others become JSON strings. A path comes from
anybody, and could otherwise begin a line of its own."""


def audit_event(event: str, *, level: int = logging.INFO, **fields: str | int | None) -> None:
    """Logs an event. `fields` say what it concerns. The facts of the call are added (call_facts.py)."""
    told = {name: value for name, value in fields.items() if value is not None}
    words = " ".join([event, *(f"{name}={_written(value)}" for name, value in told.items())])
    audit_logger.log(level, "%s", words, extra={"event": event, **told})


def _written(value: str | int) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
