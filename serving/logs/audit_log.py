"""What operators should be able to look up later, under a logger of its own: who was refused, and what was done."""

from __future__ import annotations

import logging

audit_logger = logging.getLogger("kedge.audit")


def audit_event(event: str, *, level: int = logging.INFO, **fields: str | int | None) -> None:
    """Logs that it happened. `fields` say to what; those of the call come along (call_facts.py)."""
    told = {name: value for name, value in fields.items() if value is not None}
    words = " ".join([event, *(f"{name}={value}" for name, value in told.items())])
    audit_logger.log(level, "%s", words, extra={"event": event, **told})
