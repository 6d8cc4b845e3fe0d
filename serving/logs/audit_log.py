"""The audit log, for operators to look up later who was refused and what was done. It has its own logger."""

from __future__ import annotations

import logging

audit_logger = logging.getLogger("kedge.audit")


def audit_event(event: str, *, level: int = logging.INFO, **fields: str | int | None) -> None:
    """Logs an event. `fields` say what it concerns. The facts of the call are added (call_facts.py)."""
    told = {name: value for name, value in fields.items() if value is not None}
    words = " ".join([event, *(f"{name}={value}" for name, value in told.items())])
    audit_logger.log(level, "%s", words, extra={"event": event, **told})
