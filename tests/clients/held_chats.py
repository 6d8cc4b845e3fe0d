"""OpenAI's chat completions with answers that are forced to what a model might say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.clients.held_answers import Call, Usage, Words


class HeldChats:
    path = "/v1/chat/completions"

    def held(
        self, body: dict[str, Any], answer: Call | Words, schemas: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        tools = [
            tool | {"function": tool["function"] | {"parameters": schemas[tool["function"]["name"]]}}
            if tool["function"]["name"] in schemas
            else tool
            for tool in body.get("tools", ())
        ]
        match answer:
            case Call(name):
                held: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": name}}}
            case Words(text):
                wanted = {"name": "words", "schema": {"const": text}}
                held = {"response_format": {"type": "json_schema", "json_schema": wanted}}
                held |= {"tool_choice": "none"} if tools else {}
        return body | ({"tools": tools} if tools else {}) | held

    def usage(self, told: Sequence[dict[str, Any]]) -> Usage:
        """A stream has the usage at its end, if the request asked for it (`stream_options`)."""
        usage = told[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
