"""Calls that a browser sends for a page: which sites' pages may call, and by which names of the server.

A page of any site can send calls to a server on the same machine or network as its reader. It cannot read the answers,
but the calls take effect. A site whose name resolves to the server's address (DNS rebinding) can read the answers, too.
So if there are no keys, a call is accepted only under a known name of the server, and from a page only if the page is
of the same host or its origin is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response, refuse
from serving.wire.turns import ErrorInfo

LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """`hosts`: names of the server, beside addresses and localhost; `*.example.com` stands for all names below
    example.com. `origins`: sites whose pages may call."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


NO_RULES = BrowserRules()


class BrowserCallsChecked:
    """ASGI middleware, for WebSocket handshakes, too. `keyless`: anybody can call, so hosts and origins are checked.
    With keys, hosts are checked only if `rules` names some, and a page needs a key like every caller."""

    def __init__(self, app: ASGIApp, rules: BrowserRules, *, keyless: bool) -> None:
        self._app = app
        self._rules = rules
        self._checks_hosts = keyless or bool(rules.hosts)
        self._checks_origins = keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] == "lifespan" else self._refused(Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error_response(scope, refused), scope, receive, send)

    def _refused(self, headers: Headers) -> ErrorInfo | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._checks_hosts and not _is_known(_name_in(host), self._rules.hosts):
            return _refusal(
                "host", "This name of the server is not known here. Name it in ingress.allowed_hosts."
            )
        if origin is None or not self._checks_origins or origin in self._rules.origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return _refusal("origin", "Pages of this site may not call. Name it in ingress.allowed_origins.")


def _refusal(header: str, message: str) -> ErrorInfo:
    return ErrorInfo(HTTPStatus.FORBIDDEN, f"{header}_not_allowed", message, header)


def _name_in(host: str) -> str:
    """The host name in a Host header, without the port; empty if the header is not valid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_known(name: str, hosts: Sequence[str]) -> bool:
    if name == LOCALHOST or name.endswith(f".{LOCALHOST}") or _is_address(name):
        return True
    return any(name == host or (host.startswith("*.") and name.endswith(host[1:])) for host in hosts)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
