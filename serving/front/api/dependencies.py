"""What FastAPI hands to a route's function: the service, the caller, the tenant. And who may call a route."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import Depends, Header
from starlette.requests import HTTPConnection

from serving.front.api.access import FOR_OPERATORS
from serving.front.api.errors import refusal
from serving.front.api.fields import Name
from serving.front.api.service import TurnService
from serving.keys import Caller
from serving.logs.audit_log import audit_event
from serving.logs.call_facts import CALL_FACTS
from serving.wire.turns import ServiceError


async def get_service(connection: HTTPConnection) -> TurnService:
    """The application's service. Async, because FastAPI would run a plain function on a thread."""
    service: TurnService = connection.app.state.service
    return service


async def get_caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.state.caller
    return caller


async def check_operator(caller: Annotated[Caller, Depends(get_caller)]) -> None:
    if not caller.operator:
        audit_event("operator_refused", level=logging.WARNING, tenant=caller.tenant)
        raise ServiceError(FOR_OPERATORS)


async def get_tenant(
    caller: Annotated[Caller, Depends(get_caller)],
    x_tenant_id: Annotated[Name | None, Header(alias="x-tenant-id")] = None,
) -> str:
    """The tenant whose sessions and cached prefixes a call may see: the tenant of its key. If the key has no tenant,
    the call may name one, as a gateway does."""
    if caller.tenant is not None and x_tenant_id not in (None, caller.tenant):
        audit_event("tenant_refused", level=logging.WARNING, tenant=caller.tenant, asked_for=x_tenant_id)
        raise refusal("This key is another tenant's.", "x-tenant-id", status=403, code="tenant_not_allowed")
    tenant = caller.tenant or x_tenant_id or ""
    if (facts := CALL_FACTS.get()) is not None:
        facts.tenant = tenant
    return tenant


Service = Annotated[TurnService, Depends(get_service)]
Tenant = Annotated[str, Depends(get_tenant)]
Client = Annotated[Caller, Depends(get_caller)]
OPERATORS_ONLY = [Depends(check_operator)]
"""Dependencies of a route that shows or changes what belongs to all tenants."""
