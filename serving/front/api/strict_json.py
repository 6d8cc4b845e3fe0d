"""Bodies as strict JSON: valid UTF-8, no NaN or Infinity, no lone surrogates, no type coercion, no unknown fields."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import from_json


class StrictBody(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


def _neutral_to_none(value: Any) -> Any:
    return value or None


NotSupported = Annotated[None, BeforeValidator(_neutral_to_none)]
"""A field that clients know and we do not serve: only values that ask for nothing are taken."""


class StrictJsonRequest(Request):
    """Reads its body up to the application's limit, with pydantic's parser, which refuses what Python's takes."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            declared = self.headers.get("content-length", "")
            self._check_size(int(declared) if declared.isdecimal() else 0)
            pieces: list[bytes] = []
            size_bytes = 0
            async for piece in self.stream():
                size_bytes += len(piece)
                self._check_size(size_bytes)
                pieces.append(piece)
            self._body = b"".join(pieces)
        return self._body

    def _check_size(self, size_bytes: int) -> None:
        limit_bytes: int = self.app.state.max_body_size_bytes
        if size_bytes > limit_bytes:
            raise HTTPException(413, f"The body is larger than {limit_bytes} bytes.")

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is not valid JSON: {error}") from error


class StrictJsonRoute(APIRoute):
    """Gives its handler a StrictJsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictJsonRequest(request.scope, request.receive))

        return handle
