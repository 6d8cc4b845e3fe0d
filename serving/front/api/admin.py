"""For operators: health, metrics, audits, drains."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serving.front.api.dependencies import OPERATORS_ONLY, Service
from serving.front.api.documented_replies import PLAIN_TEXT
from serving.front.api.strict_json import StrictJsonRoute
from serving.logs.audit_log import audit_event

UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"description": "No replica answers.", "content": {"application/json": {"schema": {}}}}
}


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["operations"])
    for path in ("/health", "/ping"):
        router.add_api_route(path, health, methods=["GET"], responses=UNHEALTHY)
        router.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)
    router.add_api_route("/ping", health, methods=["POST"], operation_id="ping", responses=UNHEALTHY)
    router.add_api_route("/version", version, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, responses=PLAIN_TEXT)
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


async def drain_replica(replica_id: str, service: Service) -> dict[str, str]:
    await service.drain_replica(replica_id)
    audit_event("replica_drained", replica_id=replica_id)
    return {"replica_id": replica_id, "state": "draining"}


async def audit(service: Service) -> Response:
    return JSONResponse(await service.audit())
