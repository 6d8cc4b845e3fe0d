"""The openai client with chat completions. The argument `stream` makes it stream; `whole` does not."""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from task import DESCRIPTION, INSTRUCTIONS, MAX_TOKENS, MODEL, PARAMETERS, QUESTIONS, TOOL, Seen

TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}}
]


def completion(client: OpenAI, messages: list[ChatCompletionMessageParam], streamed: bool) -> ChatCompletion:
    if not streamed:
        return client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_completion_tokens=MAX_TOKENS
        )
    with client.chat.completions.stream(
        model=MODEL,
        messages=messages,
        tools=TOOLS,
        max_completion_tokens=MAX_TOKENS,
        stream_options={"include_usage": True},
    ) as stream:
        return stream.get_final_completion()


def main(url: str, mode: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    seen = Seen()
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": INSTRUCTIONS}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = completion(client, messages, mode == "stream")
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            seen.cached_tokens.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            message = answer.choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                found = seen.find_berth(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        seen.answers.append(message.content or "")
    seen.tell()


main(*sys.argv[1:])
