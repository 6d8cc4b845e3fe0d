"""Calls by which operators plant faults. The paths exist only if `debug.faults` is set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from serving.debug.kinds import LONGEST_DELAY_S, LONGEST_S, FaultKind
from serving.front.api.dependencies import OPERATORS_ONLY
from serving.front.api.fields import Name
from serving.front.api.strict_json import StrictJsonRoute

PATH = "/v1/kedge/debug/faults"


class FaultBody(BaseModel):
    """A fault to plant. Without `replica_id`, any replica gets it. `session_id` and `tenant` are for faults of a
    session; without `session_id`, any idle session there is damaged. `delay_s` is for slow commits and slow steps. The
    fault ends after `for_s` seconds."""

    model_config = ConfigDict(extra="forbid")

    kind: FaultKind
    replica_id: Name | None = None
    session_id: Name | None = None
    tenant: str = ""
    for_s: Annotated[float, Field(gt=0, le=LONGEST_S)] = 60.0
    delay_s: Annotated[float, Field(gt=0, le=LONGEST_DELAY_S)] = 1.0


Plant = Callable[[FaultBody], Awaitable[dict[str, Any]]]
Mend = Callable[[], Awaitable[dict[str, Any]]]


def routes(plant: Plant, mend: Mend) -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["debugging"])

    @router.post(PATH, dependencies=OPERATORS_ONLY)
    async def plant_fault(body: FaultBody) -> dict[str, Any]:
        return await plant(body)

    @router.delete(PATH, dependencies=OPERATORS_ONLY)
    async def mend_faults() -> dict[str, Any]:
        return await mend()

    return router
