"""LlamaIndex's FunctionAgent over OpenAILike. The argument `stream` makes it stream; `whole` does not."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from task import INSTRUCTIONS, MAX_TOKENS, MODEL, QUESTIONS, Seen

CONTEXT = 100_000


async def main(url: str, mode: str) -> None:
    seen = Seen()

    def find_berth(ship: str) -> str:
        """Tells which berth a ship is at."""
        return seen.find_berth(ship)

    model = OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        context_window=CONTEXT,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        additional_kwargs={"stream_options": {"include_usage": True}} if mode == "stream" else {},
    )
    agent = FunctionAgent(
        tools=[find_berth], llm=model, system_prompt=INSTRUCTIONS, streaming=mode == "stream"
    )
    memory = ChatMemoryBuffer.from_defaults(token_limit=CONTEXT)
    for question in QUESTIONS:
        handler = agent.run(question, memory=memory)
        async for event in handler.stream_events():
            if isinstance(event, AgentOutput):
                usage = event.raw["usage"]
                seen.cached_tokens.append(usage["prompt_tokens_details"]["cached_tokens"])
        seen.answers.append(str(await handler))
    seen.tell()


asyncio.run(main(*sys.argv[1:]))
