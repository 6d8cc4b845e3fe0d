"""`priority`: which waiting turns go first. In vLLM lower numbers are more urgent, in SGLang higher ones.

A call with priority overtakes other tenants' calls, too, so it counts only if the operator allows it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serving.front.api.errors import UNSUPPORTED, refusal

MOST = 1000

Priority = Annotated[int, Field(ge=-MOST, le=MOST)]
_IF_ALLOWED = "Numbers other than 0 need the setting api.request_priority."
LOWER_FIRST = f"Of the waiting turns, the one with the lowest number goes first. {_IF_ALLOWED}"
HIGHER_FIRST = f"Of the waiting turns, the one with the highest number goes first. {_IF_ALLOWED}"


def engine_priority(allowed: bool, *, lower_first: int | None = None, higher_first: int | None = None) -> int:
    """A call's priority for the engine, where higher goes first. The body gives it in its protocol's order: as
    `lower_first` or `higher_first`. `allowed` is the operator's setting. Raises ServiceError."""
    priority = (higher_first or 0) - (lower_first or 0)
    if priority and not allowed:
        raise refusal(
            "priority: only 0 is taken here; the setting api.request_priority allows others.",
            "priority",
            code=UNSUPPORTED,
        )
    return priority
