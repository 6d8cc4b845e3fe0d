"""A LangChain agent over ChatOpenAI. The argument chooses `chat` completions or `responses`."""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from task import INSTRUCTIONS, MAX_TOKENS, MODEL, QUESTIONS, Seen


def main(url: str, mode: str) -> None:
    seen = Seen()

    def find_berth(ship: str) -> str:
        """Tells which berth a ship is at."""
        return seen.find_berth(ship)

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        max_tokens=MAX_TOKENS,
        max_retries=0,
        use_responses_api=mode == "responses",
    )
    agent = create_agent(model, [find_berth], system_prompt=INSTRUCTIONS)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
        seen.answers.append(messages[-1].text)
    for message in messages:
        if isinstance(message, AIMessage):
            seen.cached_tokens.append(message.usage_metadata["input_token_details"]["cache_read"])
    seen.tell()


main(*sys.argv[1:])
