"""Bodies as strict JSON: valid UTF-8, no NaN or Infinity, no lone surrogates, no type coercion, no unknown fields.

If the application lets unknown fields pass, they are left out at every depth, and a header of the reply names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar, cast

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import from_json

from serving.front.api.body_limits import BodyLimits
from serving.front.api.documented_replies import documented_errors
from serving.front.api.ignored_fields import IGNORED_FIELDS, IgnoredFields
from serving.front.api.rules import rules_of

Body = TypeVar("Body", bound=BaseModel)
Location = tuple[str | int, ...]

SMALL_BODY_BYTES = 64 * 1024
"""The values of larger bodies are counted before parsing, and they are validated on a thread."""

BODY_PATIENCE_S = 20.0
BODY_BYTES_PER_S = 16 * 1024
"""A body must arrive within BODY_PATIENCE_S, plus a second for every BODY_BYTES_PER_S bytes received. Slower clients
would occupy the front end for nothing."""

MOST_FIELDS = 128
"""More than any object of ours has. Each unknown field would be a separate error."""


class StrictBody(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MOST_FIELDS:
            raise ValueError(f"{len(values)} fields; at most {MOST_FIELDS} are looked at.")
        if isinstance(info.context, IgnoredFields):
            return info.context.without_unknown(values, cls.model_fields)
        return values


def _neutral_to_none(value: Any) -> Any:
    return value or None


NotSupported = Annotated[None, BeforeValidator(_neutral_to_none)]
"""A field that clients know and we do not serve: only values that ask for nothing are accepted."""


class InvalidBody(HTTPException):
    """A body that its model refused. `error` is one of pydantic's; its location begins with the body."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(400)
        self.error = error


class StrictJsonRequest(Request):
    """Reads its body up to the application's limits, with pydantic's parser, which is stricter than Python's.

    FastAPI validates what `json()` returns as `model`. A large body is validated here instead, on a thread, so that
    streams go on meanwhile; FastAPI takes the model as it is. So is every body if unknown fields are `ignored` (None:
    they are refused).
    """

    model: type[BaseModel] | None = None
    ignored: IgnoredFields | None = None

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            encoding = self.headers.get("content-encoding", "").strip().lower()
            if encoding not in ("", "identity"):
                raise HTTPException(
                    415, f"content-encoding: {encoding[:60]!r} is not supported; send the body as it is."
                )
            limits = self._limits
            declared = self.headers.get("content-length", "")
            limits.check_size(int(declared) if declared.isdecimal() else 0)
            try:
                self._body = await self._arrived(limits)
            except TimeoutError:
                message = f"The body did not come at {BODY_BYTES_PER_S // 1024} KiB a second."
                raise HTTPException(408, message, {"connection": "close"}) from None
        return self._body

    async def _arrived(self, limits: BodyLimits) -> bytes:
        """The whole body. Raises HTTPException if it is too large, and TimeoutError if it arrives too slowly."""
        pieces: list[bytes] = []
        size_bytes = 0
        async with asyncio.timeout(BODY_PATIENCE_S) as patience:
            async for piece in self.stream():
                size_bytes += len(piece)
                limits.check_size(size_bytes)
                pieces.append(piece)
                patience.reschedule((patience.when() or 0.0) + len(piece) / BODY_BYTES_PER_S)
        return b"".join(pieces)

    async def json(self) -> Any:
        body = await self.body()
        value = await parsed_json(body, self._limits)
        is_small = len(body) <= SMALL_BODY_BYTES
        if self.model is None or (is_small and self.ignored is None):
            return value
        return await validated_body(self.model, value, self.ignored, is_small=is_small)

    @property
    def _limits(self) -> BodyLimits:
        return rules_of(self.app).body_limits()


class StrictJsonRoute(APIRoute):
    """A route whose handler gets a StrictJsonRequest, and which is documented with its protocol's errors."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        settings["responses"] = documented_errors(path) | (settings.get("responses") or {})
        super().__init__(path, endpoint, **settings)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        body_field = self.body_field
        model = None if body_field is None else cast(type[BaseModel], body_field.field_info.annotation)

        async def handle(request: Request) -> Response:
            strict = StrictJsonRequest(request.scope, request.receive)
            strict.model = model
            strict.ignored = IgnoredFields() if rules_of(request.app).ignore_unknown_fields else None
            response = await handler(strict)
            if strict.ignored:
                response.headers[IGNORED_FIELDS] = strict.ignored.header
            return response

        return handle


async def parsed_json(body: bytes, limits: BodyLimits) -> Any:
    """The body's JSON. Raises HTTPException if it is not JSON or has too many values, and InvalidBody for an integer
    that is too large."""
    if len(body) > SMALL_BODY_BYTES:
        for _ in limits.check_values(body):
            await asyncio.sleep(0)
    return _parsed(body)


async def validated_body(
    model: type[Body], value: Any, ignored: IgnoredFields | None, *, is_small: bool
) -> Body:
    """The value as its model; validated on a thread unless it is small. Raises InvalidBody."""
    if is_small:
        return _validated(model, value, ignored)
    return await asyncio.to_thread(_validated, model, value, ignored)


def _parsed(body: bytes) -> Any:
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}") from error
    if not can_travel(value) and (at := _large_integer_in(value)) is not None:
        problem = "an integer of more than 64 bits is not supported"
        raise InvalidBody({"type": "int_parsing_size", "loc": ("body", *at), "msg": problem})
    return value


def can_travel(value: Any) -> bool:
    """Whether this JSON can be sent to a replica: msgpack holds no integer of more than 64 bits. To write it takes a
    hundredth of the time that a look at each value takes."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def _large_integer_in(body: Any) -> Location | None:
    """Where in a body an integer has more than 64 bits; of a list's elements, where the list is. None: nowhere but in
    the inputs of tool calls of the Messages protocol: a model wrote these, and such a call is sent to a replica as
    text."""
    left: list[tuple[Location, Any]] = [((), body)]
    while left:
        at, value = left.pop()
        match value:
            case dict() if _is_tool_input(at):
                pass
            case dict():
                left += [((*at, key), each) for key, each in value.items()]
            case list():
                left += [
                    ((*at, index) if isinstance(each, dict) else at, each) for index, each in enumerate(value)
                ]
            case int() if not -(2**63) <= value < 2**64:
                return at
    return None


def _is_tool_input(at: Location) -> bool:
    """Whether this is the place of a tool call's input in a body of the Messages protocol."""
    return len(at) == 5 and (at[0], at[2], at[4]) == ("messages", "content", "input")


def _validated(model: type[Body], value: Any, ignored: IgnoredFields | None) -> Body:
    try:
        body = model.model_validate(value, context=ignored)
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
        raise InvalidBody(first | {"loc": ("body", *first["loc"])}) from None
    if ignored:
        ignored.find_in(value)
    return body
