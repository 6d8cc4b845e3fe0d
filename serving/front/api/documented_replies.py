"""Which protocol's errors a path has, and what the served OpenAPI document says of errors and of answers that are not
JSON."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel

_MESSAGES_PATH = "/v1/messages"
_WITH_STATUSES = "/v1/"


class OpenAiErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(BaseModel):
    """An error of OpenAI's protocols, and of Kedge's own calls."""

    error: OpenAiErrorDetail


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """An error of Anthropic's protocol."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class SessionErrorDetail(BaseModel):
    message: str
    code: str
    param: str | None


class SessionError(BaseModel):
    """An error of SGLang's session protocol."""

    error: SessionErrorDetail


class ErrorShape(Enum):
    """The shape of each protocol's errors. The value is the model of the body."""

    OPENAI = OpenAiError
    MESSAGES = MessagesError
    SESSION = SessionError

    @property
    def has_statuses(self) -> bool:
        """Whether errors keep their own status. The session protocol answers every wrong call with 400."""
        return self is not ErrorShape.SESSION


def error_shape(path: str) -> ErrorShape:
    if path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/"):
        return ErrorShape.MESSAGES
    return ErrorShape.OPENAI if path.startswith(_WITH_STATUSES) else ErrorShape.SESSION


def documented_errors(path: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route. Without them FastAPI documents a 422, a status that is never sent here."""
    model = error_shape(path).value
    return {
        "4XX": {"model": model, "description": "The call is refused; `error.message` says why."},
        "5XX": {"model": model, "description": "The call is right, and cannot be served now."},
    }


STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The `responses` of a route whose answer is a stream if the body asks for it. A schema would have to describe single
events."""

PLAIN_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
"""The `responses` of a route whose answer is text."""
