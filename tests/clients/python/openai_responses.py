"""The openai client with Responses. With the argument `named` a request names the last response; with `session` it
names a session; with `whole` it sends the whole input each time."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI, omit
from task import DESCRIPTION, INSTRUCTIONS, MAX_TOKENS, MODEL, PARAMETERS, QUESTIONS, TOOL, Seen

TOOLS: list[Any] = [
    {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": True}
]


def main(url: str, mode: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    named, session, seen = mode == "named", mode == "session", Seen()
    last, items = None, []
    for question in QUESTIONS:
        new: list[Any] = [{"role": "user", "content": question}]
        while new:
            items = new if named or session else [*items, *new]
            response = client.responses.create(
                model=MODEL,
                instructions=INSTRUCTIONS,
                input=items,
                tools=TOOLS,
                max_output_tokens=MAX_TOKENS,
                previous_response_id=last if named and last else omit,
                extra_headers={"x-session-id": "anna-responses"} if session else None,
            )
            assert response.usage is not None
            seen.cached_tokens.append(response.usage.input_tokens_details.cached_tokens)
            last, new = response.id, []
            items = [*items, *response.output]
            for item in response.output:
                if item.type == "function_call":
                    found = seen.find_berth(**json.loads(item.arguments))
                    new.append({"type": "function_call_output", "call_id": item.call_id, "output": found})
        seen.answers.append(response.output_text)
    if not session:
        assert client.responses.retrieve(response.id).output_text == response.output_text
    seen.tell()


main(*sys.argv[1:])
