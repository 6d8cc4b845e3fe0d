"""OpenAI's Responses with answers that are forced to what a model might say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.clients.held_answers import Call, Usage, Words


class HeldResponses:
    path = "/v1/responses"

    def held(
        self, body: dict[str, Any], answer: Call | Words, schemas: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        tools = [
            tool | {"parameters": schemas[tool["name"]]} if tool.get("name") in schemas else tool
            for tool in body.get("tools", ())
        ]
        match answer:
            case Call(name):
                held: dict[str, Any] = {"tool_choice": {"type": "function", "name": name}}
            case Words(text):
                wanted = {"type": "json_schema", "name": "words", "schema": {"const": text}}
                held = {"text": {**(body.get("text") or {}), "format": wanted}}
                held |= {"tool_choice": "none"} if tools else {}
        return body | ({"tools": tools} if tools else {}) | held

    def usage(self, told: Sequence[dict[str, Any]]) -> Usage:
        """A stream's last event contains the whole response."""
        usage = told[-1].get("response", told[-1])["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Usage(usage["input_tokens"], cached, usage["output_tokens"])
