"""For operators: health, metrics, audits, and the sessions as the ledger knows them; forks."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from controllers.session_keys import session_key
from serving.front.api.errors import refusal
from serving.front.api.fields import OPERATORS_ONLY, Client, Count, CountOrZero, Name, Service, Tenant
from serving.front.api.strict_json import StrictBody, StrictJsonRoute
from serving.wire.turns import ServiceError

MOST_IN_PAGE = 1000
"""Sessions, if the caller asks for no fewer: a page holds up the controller's loop and this one's for some ms."""
MAX_CURSOR_CHARS = 1024

PageSize = Annotated[int, Query(ge=1, le=MOST_IN_PAGE)]
Cursor = Annotated[str, Query(max_length=MAX_CURSOR_CHARS)]
Timeout = Annotated[float, Field(gt=0, le=1e9)]


class NewSession(StrictBody):
    """`timeout_s`: idle seconds until it ends; `capacity_tokens`: the most it may hold."""

    session_id: Name | None = None
    timeout_s: Timeout | None = None
    capacity_tokens: Count | None = None


class NewFork(StrictBody):
    """`length`: how many committed tokens the fork begins with, all if left out; `timeout_s`: the parent's likewise."""

    new_session_id: Name | None = None
    length: CountOrZero | None = None
    timeout_s: Timeout | None = None


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["operations"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/ping", health, methods=["GET", "POST"])
    router.add_api_route("/version", version, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"])
    router.add_api_route("/v1/kedge/sessions", list_sessions, methods=["GET"])
    router.add_api_route("/v1/kedge/sessions", create_session, methods=["POST"], status_code=201)
    router.add_api_route("/v1/kedge/sessions/{session_id:path}", get_session, methods=["GET"])
    router.add_api_route("/v1/kedge/sessions/{session_id:path}", delete_session, methods=["DELETE"])
    router.add_api_route("/v1/kedge/sessions/{session_id:path}/fork", fork_session, methods=["POST"])
    router.add_api_route(
        "/v1/kedge/replicas/{replica_id}/drain",
        drain_replica,
        methods=["POST"],
        status_code=202,
        dependencies=OPERATORS_ONLY,
    )
    router.add_api_route("/v1/kedge/audit", audit, methods=["GET"], dependencies=OPERATORS_ONLY)
    return router


async def health(service: Service) -> Response:
    healthy = await service.healthy()
    return JSONResponse({"status": "ok" if healthy else "unhealthy"}, 200 if healthy else 503)


async def version() -> dict[str, str]:
    return {"version": importlib.metadata.version("kedge")}


async def metrics(service: Service) -> Response:
    return Response(await service.metrics_text(), media_type=CONTENT_TYPE_LATEST)


async def list_sessions(
    service: Service,
    caller: Client,
    tenant: Tenant,
    limit: PageSize = MOST_IN_PAGE,
    after: Cursor | None = None,
) -> dict[str, Any]:
    """Those of the tenant; an operator who names none sees all. `next` is what the next page comes `after`; null: this
    is the last."""
    everybodys = caller.operator and not tenant
    found = await service.sessions(tenant=None if everybodys else tenant, after=after, limit=limit + 1)
    page = found[:limit]
    more = session_key(page[-1].tenant, page[-1].session_id) if len(found) > limit else None
    return {"sessions": [asdict(session) for session in page], "next": more}


async def create_session(body: NewSession, service: Service, tenant: Tenant) -> dict[str, str]:
    session_id = await service.open_session(
        body.session_id, timeout_s=body.timeout_s, capacity_tokens=body.capacity_tokens, tenant=tenant
    )
    return {"session_id": session_id}


async def fork_session(session_id: str, body: NewFork, service: Service, tenant: Tenant) -> dict[str, Any]:
    forked = await service.fork_session(
        session_id, body.new_session_id, length=body.length, timeout_s=body.timeout_s, tenant=tenant
    )
    return asdict(forked)


async def get_session(session_id: str, service: Service, tenant: Tenant) -> dict[str, Any]:
    session = await service.session(session_id, tenant=tenant)
    if session is None:
        raise _unknown()
    return asdict(session)


async def delete_session(session_id: str, service: Service, tenant: Tenant) -> Response:
    if not await service.close_session(session_id, tenant=tenant):
        raise _unknown()
    return Response(status_code=204)


async def drain_replica(replica_id: str, service: Service) -> dict[str, str]:
    await service.drain_replica(replica_id)
    return {"replica_id": replica_id, "state": "draining"}


async def audit(service: Service) -> Response:
    return JSONResponse(await service.audit())


def _unknown() -> ServiceError:
    return refusal("This session does not exist.", "session_id", status=404, code="session_not_found")
