"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from serving.api.fields import Count, TopLogprobs
from serving.api.openai_replies import Reply, StopDetails, Usage
from serving.api.openai_requests import OpenAiBody
from serving.api.strict_json import NotSupported, StrictBody


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


def _text_or_parts(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    Discriminator(_text_or_parts),
]


class Message(StrictBody):
    """A message as clients send it, or send back what they were answered."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    annotations: NotSupported = None
    audio: NotSupported = None
    function_call: NotSupported = None
    reasoning: NotSupported = None
    reasoning_content: NotSupported = None
    refusal: NotSupported = None
    tool_calls: NotSupported = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: text parts are joined, one per line."""
        text = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        message = {"role": str(self.role), "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(OpenAiBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Without tools it has no effect.")
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True, None] = None

    add_special_tokens: NotSupported = None
    audio: NotSupported = None
    chat_template: NotSupported = None
    continue_final_message: NotSupported = None
    documents: NotSupported = None
    echo: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    mm_processor_kwargs: NotSupported = None
    prediction: NotSupported = None
    prompt_cache_retention: NotSupported = None
    reasoning_effort: NotSupported = None
    store: NotSupported = None
    tools: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None


class TokenChoice(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenChoice):
    top_logprobs: list[TokenChoice]


class ChatLogprobs(Reply):
    content: list[ChatLogprob]


class AnswerMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(StopDetails):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatReply(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Reply):
    role: Literal["assistant"] | None = Field(None, exclude_if=lambda role: role is None)
    content: str


class ChunkChoice(StopDetails):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = Field(None, exclude_if=lambda usage: usage is None)
