"""The console at /console: a page of plain files, which calls the API like any client (serving/front/console)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from serving.front.api.access import CONSOLE_PATH

FOLDER = Path(__file__).parents[1] / "console"
HEADERS = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'",
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
)
"""The page runs only its own scripts, calls only this server, and cannot be framed."""


def routes() -> APIRouter:
    files = StaticFiles(directory=FOLDER)

    async def reply(name: str, request: Request) -> Response:
        found = await files.get_response(name, request.scope)
        found.headers.update(HEADERS)
        return found

    async def page(request: Request) -> Response:
        return await reply("index.html", request)

    async def to_page() -> Response:
        """Redirects to the path without the slash, to which the page's links are relative. The redirect is relative,
        too: a proxy may have put a prefix before the path."""
        return RedirectResponse(f"..{CONSOLE_PATH}", 308)

    async def file(name: str, request: Request) -> Response:
        return await reply(name, request)

    router = APIRouter(include_in_schema=False)
    for path, endpoint in (
        (CONSOLE_PATH, page),
        (f"{CONSOLE_PATH}/", to_page),
        (f"{CONSOLE_PATH}/{{name}}", file),
    ):
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"])
    return router
