"""Anthropic's Messages with answers that are forced to what a model might say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.clients.held_answers import Call, Usage, Words


class HeldMessages:
    path = "/v1/messages"

    def held(
        self, body: dict[str, Any], answer: Call | Words, schemas: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        tools = [
            tool | {"input_schema": schemas[tool["name"]]} if tool["name"] in schemas else tool
            for tool in body.get("tools", ())
        ]
        match answer:
            case Call(name):
                held: dict[str, Any] = {"tool_choice": {"type": "tool", "name": name}}
            case Words(text):
                wanted = {"type": "json_schema", "schema": {"const": text}}
                config = {**body.get("output_config", {}), "format": wanted}
                held = {"output_config": config}
                held |= {"tool_choice": {"type": "none"}} if tools else {}
        return body | ({"tools": tools} if tools else {}) | held

    def usage(self, told: Sequence[dict[str, Any]]) -> Usage:
        """The usage of a stream is that of its `message_delta` event."""
        (usage,) = [each["usage"] for each in told if each["type"] in ("message", "message_delta")]
        cached = usage["cache_read_input_tokens"]
        return Usage(usage["input_tokens"] + cached, cached, usage["output_tokens"])
