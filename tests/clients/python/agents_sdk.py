"""OpenAI's Agents SDK: its Runner with a function tool, over Responses or chat completions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from task import INSTRUCTIONS, MAX_TOKENS, MODEL, QUESTIONS, Seen

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def main(url: str, mode: str) -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    seen = Seen()

    @function_tool
    def find_berth(ship: str) -> str:
        """Tells which berth a ship is at."""
        return seen.find_berth(ship)

    agent = Agent(
        name="Harbour",
        instructions=INSTRUCTIONS,
        model=MODELS[mode](MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)),
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
        tools=[find_berth],
    )
    said: list[Any] = []
    for question in QUESTIONS:
        result = await Runner.run(agent, [*said, {"role": "user", "content": question}])
        said = result.to_input_list()
        seen.answers.append(result.final_output)
        seen.cached_tokens += [each.usage.input_tokens_details.cached_tokens for each in result.raw_responses]
    seen.tell()


asyncio.run(main(*sys.argv[1:]))
