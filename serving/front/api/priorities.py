"""`priority`: which turns go before others that wait. vLLM's lower numbers are more urgent, SGLang's higher ones.

Whoever sends it overtakes other tenants, too, so it counts only where the operator says so.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serving.front.api.errors import UNSUPPORTED, refusal

MOST = 1000

Priority = Annotated[int, Field(ge=-MOST, le=MOST)]
_IF_ALLOWED = "where the setting api.request_priority is on; else only 0 is taken."
LOWER_FIRST = f"Of those that wait the lowest goes first, {_IF_ALLOWED}"
HIGHER_FIRST = f"Of those that wait the highest goes first, {_IF_ALLOWED}"


def engine_priority(allowed: bool, *, lower_first: int | None = None, higher_first: int | None = None) -> int:
    """A call's priority, of which higher goes first, from what its body says in its protocol's way. `allowed` is the
    operator's setting. Raises ServiceError."""
    priority = (higher_first or 0) - (lower_first or 0)
    if priority and not allowed:
        raise refusal(
            "priority: only 0 is taken here; the setting api.request_priority allows others.",
            "priority",
            code=UNSUPPORTED,
        )
    return priority
