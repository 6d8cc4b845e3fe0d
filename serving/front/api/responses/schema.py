"""The body of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from engine.api import LogprobParams
from serving.front.api.answers.held import ANY_OBJECT, HeldAnswer
from serving.front.api.answers.tools import ToolUse
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    Count,
    JsonSchema,
    Name,
    OtherKind,
    TopLogprobs,
    most_tokens,
    schema_constraint,
)
from serving.front.api.responses.history import template_messages
from serving.front.api.responses.items import Input, Json
from serving.front.api.responses.tools import (
    OfferedTools,
    ResponsesToolChoice,
    ResponsesTools,
    offered_tools,
)
from serving.front.api.shared_fields import SharedFields, TemplateKwargs
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import ChatPrompt, ModelInfo

MAX_INCLUDED = 32
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "message.output_text.logprobs",
]


class PlainText(StrictBody):
    type: Literal["text"]


class JsonObject(StrictBody):
    type: Literal["json_object"]


class JsonFormat(StrictBody):
    """`strict` has no effect: a schema is enforced, or the request is refused."""

    type: Literal["json_schema"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    json_schema: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


def _kind_of_format(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else "<other>"


TextFormat = Annotated[
    Annotated[PlainText, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonFormat, Tag("<json_schema>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_kind_of_format),
]


class TextConfig(StrictBody):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="This field has no effect.")

    def held(self) -> HeldAnswer | None:
        """What the answer is held to."""
        match self.format:
            case JsonFormat():
                field = "text.format.schema"
                return HeldAnswer(schema_constraint(self.format.json_schema, field), field)
            case JsonObject():
                return HeldAnswer(schema_constraint(ANY_OBJECT, "text.format"), "text.format")
        return None


class ReasoningConfig(StrictBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The chat template gets it as `reasoning_effort`. Some templates ignore it."
    )
    summary: Literal["auto", "concise", "detailed", "none"] | None = Field(
        None, description="This field has no effect: answers have the thoughts themselves, not a summary."
    )
    generate_summary: str | None = Field(None, description="This field has no effect.")
    context: str | None = Field(None, description="This field has no effect.")
    mode: str | None = Field(None, description="This field has no effect.")


class ResponseStreamOptions(StrictBody):
    include_obfuscation: bool | None = Field(None, description="This field has no effect.")


class ConversationId(StrictBody):
    id: Name


def _id_or_object(value: Any) -> str:
    return "<object>" if isinstance(value, dict) else "<id>"


NamedConversation = Annotated[
    Annotated[Name, Tag("<id>")] | Annotated[ConversationId, Tag("<object>")], Discriminator(_id_or_object)
]


class ResponsesBody(SharedFields):
    """`input` is a text or a list of items; it may be missing if the response goes on from something. `top_k`, `min_p`,
    `repetition_penalty`, `ignore_eos` and `seed` are vLLM's fields."""

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: NamedConversation | None = None
    store: bool | None = Field(
        None, description="Unless this is false, the response is stored, and later responses can continue it."
    )
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    tools: ResponsesTools | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None,
        description="Read where a call is required: the answer then has one. With `auto` it has no effect.",
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    # Hints: without effect on the answer.
    client_metadata: Json | None = None
    max_tool_calls: Count | None = Field(
        None,
        description="This field has no effect: it limits tools that the server runs, and there are none.",
    )
    truncation: Literal["disabled"] | None = None

    background: bool | None = Field(
        None,
        description="The answer is computed in the background. The client gets it by its id. store may not be false.",
    )
    context_management: NotSupported = None
    prompt: NotSupported = None
    top_logprobs: TopLogprobs | None = Field(
        None, description="It needs `message.output_text.logprobs` in `include`."
    )

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def is_background(self) -> bool:
        return self.background is True

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named

    @property
    def encrypts_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def logprobs(self) -> LogprobParams | None:
        return LogprobParams(True, self.top_logprobs or 0) if self.tells_logprobs else None

    @property
    def template_kwargs(self) -> Json:
        kwargs: Json = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            kwargs["reasoning_effort"] = self.reasoning.effort
        return kwargs | (self.chat_template_kwargs or {})

    def held(self) -> HeldAnswer | None:
        return None if self.text is None else self.text.held()

    def offered_tools(self, model: ModelInfo) -> OfferedTools:
        """Raises ServiceError, which names the field."""
        return offered_tools(self.tools, self.tool_choice, self.parallel_tool_calls, model)

    def chat_prompt(self, said: Sequence[Json], tools: ToolUse) -> ChatPrompt:
        """The prompt of a response in whose conversation `said` was said, the input included."""
        messages = template_messages(self.instructions, said)
        return ChatPrompt(messages, self.template_kwargs, tools.for_template())

    def most_tokens(self, model: ModelInfo) -> int | None:
        """The most tokens of the answer, thoughts included. None: as many as the context has room for."""
        return most_tokens(model, self.max_output_tokens)

    def asked(self) -> Json:
        """The fields that the client set, without the input, as JSON."""
        return self.model_dump(
            mode="json", by_alias=True, exclude={"input"}, exclude_unset=True, serialize_as_any=True
        )

    def repeated(self, model: ModelInfo) -> dict[str, Any]:
        """The fields of the request that a response repeats. Sampling that the request does not set is the model's
        default."""
        said = self.model_dump(mode="json", by_alias=True, exclude={"input"}, serialize_as_any=True)
        text = said["text"] or {}
        return {
            "background": self.is_background,
            "conversation": None if self.conversation_id is None else {"id": self.conversation_id},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": said["reasoning"] or {"effort": None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": model.sampling.temperature if self.temperature is None else self.temperature,
            "text": text | {"format": text.get("format") or {"type": "text"}},
            "tool_choice": said["tool_choice"] or "auto",
            "tools": said["tools"] or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": model.sampling.top_p if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def check_logprobs(body: ResponsesBody, *, is_parted: bool) -> None:
    """Refuses log-probabilities that cannot be given. `is_parted`: the answer is searched for calls or thoughts."""
    if not body.tells_logprobs:
        if body.top_logprobs:
            raise refusal(f"top_logprobs: needs {LOGPROBS!r} in include.", "top_logprobs")
        return
    if body.is_background:
        raise refusal(
            f"include: {LOGPROBS!r} is not kept, and what a response in the background says is told from what is.",
            "include",
        )
    if is_parted:
        raise refusal(
            f"include: {LOGPROBS!r} is told of answers that are text alone: without tools that may be called, and "
            "without thoughts.",
            "include",
        )


def check_state(body: ResponsesBody) -> None:
    """Refuses fields that exclude each other, of those that say what is stored and what the response goes on from."""
    if body.is_background and not body.is_stored:
        raise refusal("background: such a response is stored, so store may not be false.", "background")
    if not body.input and body.conversation is None and body.previous_response_id is None:
        raise refusal("input: give an input, or something to go on from.", "input")
    if body.conversation is None:
        return
    if body.previous_response_id is not None:
        raise refusal(
            "conversation: it says what is gone on from, so previous_response_id may not.", "conversation"
        )
    if not body.is_stored:
        raise refusal("conversation: a response in one is stored, so store may not be false.", "conversation")


def in_named_session(body: ResponsesBody) -> ResponsesBody:
    """The body of a response that is a turn of the session that `x-session-id` names. The session keeps it, so it is
    not stored under its own id. Refuses fields that name a conversation of their own, or need a stored response."""
    excluded = {
        "store": body.store is True,
        "previous_response_id": body.previous_response_id is not None,
        "conversation": body.conversation is not None,
        "background": body.is_background,
    }
    param = next((name for name, is_asked in excluded.items() if is_asked), None)
    if param is not None:
        raise refusal(
            f"{param}: not together with x-session-id. The session has what was said and keeps the response: send only "
            f"the new input, without {param}. Or leave out the header.",
            param,
        )
    return body.model_copy(update={"store": False})
