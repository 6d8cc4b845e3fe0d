"""All applications of a process have the same routes: FastAPI takes long to make them."""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute

from serving.front.http import create_http_app

NO_SERVICE: Any = None


def routes_of_another() -> dict[str, APIRoute]:
    routes = create_http_app(NO_SERVICE).routes
    return {f"{sorted(each.methods)} {each.path}": each for each in routes if isinstance(each, APIRoute)}


def test_applications_share_their_routes() -> None:
    """Each used to make all of them again at its first request, which took 80 ms, and looked up each request twice."""
    first, second = routes_of_another(), routes_of_another()
    shared = [each for each in first if first[each] is second[each]]
    assert {"['POST'] /v1/chat/completions", "['POST'] /generate", "['GET'] /metrics"} <= set(shared)
