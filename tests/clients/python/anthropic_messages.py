"""The anthropic client with its tool runner. The argument `stream` makes it stream; `whole` does not."""

from __future__ import annotations

import sys
from typing import Any

from anthropic import Anthropic, beta_tool
from task import INSTRUCTIONS, MAX_TOKENS, MODEL, QUESTIONS, Seen


def main(url: str, mode: str) -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    seen = Seen()

    @beta_tool
    def find_berth(ship: str) -> str:
        """Tells which berth a ship is at.

        Args:
            ship: Its name.
        """
        return seen.find_berth(ship)

    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=MAX_TOKENS,
            system=INSTRUCTIONS,
            messages=messages,
            tools=[find_berth],
            stream=mode == "stream",
            thread=False,  # otherwise each run begins with a request that Kedge refuses
        )
        for turn in runner:
            message = turn.get_final_message() if mode == "stream" else turn
            seen.cached_tokens.append(message.usage.cache_read_input_tokens or 0)
            messages.append({"role": "assistant", "content": message.content})
            if results := runner.generate_tool_call_response():
                messages.append(results)
        seen.answers.append("".join(block.text for block in message.content if block.type == "text"))
    seen.tell()


main(*sys.argv[1:])
