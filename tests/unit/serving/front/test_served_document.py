"""`/openapi.json` describes the replies that clients get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis

from serving.front.http import create_http_app
from tests.unit.serving.operation_calls import DOCUMENTED
from tests.unit.serving.served_service import served_service

ERRORS = {"/v1/messages": "MessagesError", "/v1/messages/count_tokens": "MessagesError"}
STREAMING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    no_service: Any = None
    return create_http_app(no_service).openapi()


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_errors_have_the_shape_of_their_protocol(document: dict[str, Any]) -> None:
    for path, operation in _operations(document):
        expected = ERRORS.get(path, "OpenAiError" if path.startswith("/v1/") else "SessionError")
        for status in ("4XX", "5XX"):
            content = operation["responses"][status]["content"]
            assert content == {
                "application/json": {"schema": {"$ref": f"#/components/schemas/{expected}"}}
            }, path


def test_nothing_is_documented_that_nobody_gets(document: dict[str, Any]) -> None:
    """FastAPI documents a 422 of its own if it is not told what else comes."""
    assert all("422" not in operation["responses"] for _, operation in _operations(document))
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


def test_each_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in _operations(document)]
    assert len(set(names)) == len(names)


def test_answers_and_streams_are_as_documented(tmp_path: Path) -> None:
    with served_service(tmp_path) as served:
        document = schemathesis.openapi.from_url(f"{served.address}/openapi.json")
        for path, body in STREAMING.items():
            for streamed in (True, False):
                case = document[path]["POST"].Case(
                    body=body | {"stream": streamed}, media_type="application/json"
                )
                reply = case.call(base_url=served.address)
                assert reply.status_code == 200, reply.text
                (content_type,) = reply.headers["content-type"]
                assert content_type.startswith("text/event-stream") is streamed
                case.validate_response(reply, checks=DOCUMENTED)


WITHOUT_EFFECT = {
    "MessagesBody": [
        "speed",
        "user_profile_id",
        "workspace_id",
        "service_tier",
        "inference_geo",
        "diagnostics",
    ],
    "CountTokensBody": ["speed", "user_profile_id", "workspace_id"],
    "AnthropicToolChoice": ["disable_parallel_tool_use"],
}


def test_a_field_of_messages_without_effect_says_so(document: dict[str, Any]) -> None:
    for name, fields in WITHOUT_EFFECT.items():
        properties = document["components"]["schemas"][name]["properties"]
        assert all("no effect" in properties[field].get("description", "") for field in fields)
