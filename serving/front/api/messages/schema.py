"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from engine.api import SamplingParams
from serving.front.api.answers.held import HeldAnswer
from serving.front.api.answers.tools import ToolUse
from serving.front.api.errors import refusal
from serving.front.api.fields import (
    Count,
    CountOrZero,
    JsonSchema,
    StopString,
    Temperature,
    TopK,
    TopP,
    base_sampling,
    schema_constraint,
)
from serving.front.api.messages.blocks import (
    AssistantMessage,
    CacheControl,
    Messages,
    Text,
    one_of,
    tag_of,
)
from serving.front.api.messages.history import for_template
from serving.front.api.messages.tools import AnthropicToolChoice, AnthropicTools
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import ChatPrompt, ModelInfo

MAX_EDITS = 16
_NO_EFFECT = "This field has no effect."


class ThinkingEnabled(StrictBody):
    """The budget has no effect. Thoughts are always shown in full."""

    type: Literal["enabled"]
    budget_tokens: Count
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBetweenTools(StrictBody):
    type: Literal["between_tools"]


class ThinkingDisabled(StrictBody):
    type: Literal["disabled"]


class ThinkingAdaptive(StrictBody):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("<enabled>")]
    | Annotated[ThinkingDisabled, Tag("<disabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingBetweenTools, Tag("<between_tools>")],
    Discriminator(tag_of("type")),
    BeforeValidator(one_of("type", "enabled", "disabled", "adaptive", "between_tools")),
]


class JsonOutput(StrictBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The chat template gets it as `reasoning_effort`. Some templates ignore it."
    )
    format: JsonOutput | None = None
    task_budget: NotSupported = None


class ContextManagement(StrictBody):
    """The server removes nothing from a context, and replies say so."""

    edits: Annotated[list[dict[str, Any]], Field(max_length=MAX_EDITS)] | None = None


class Metadata(StrictBody):
    user_id: str | None = Field(
        None,
        description="Requests of the same user go to one replica as long as its load allows it, if the setting "
        "sessions.unnamed.affinity.user says so.",
    )


class PromptBody(StrictBody):
    """The fields of both calls: those that make up the prompt, and others."""

    model: str | None = None
    messages: Messages
    system: Text | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(
        None,
        description="The chat template gets it as `enable_thinking` and `thinking`. Without this field both are "
        "false. A template without such a switch thinks as it always does.",
    )
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = Field(
        None, description="The same as output_config.format. Send only one of them."
    )

    # Hints, and about the caller: without effect on the answer.
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard", "fast"] | None = Field(None, description=_NO_EFFECT)
    user_profile_id: str | None = Field(None, description=_NO_EFFECT)
    workspace_id: str | None = Field(None, description=_NO_EFFECT)

    billing_policy: NotSupported = None
    compaction: NotSupported = None
    mcp_servers: NotSupported = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside the messages. Templates use one name or the other for whether to think.
        Clients of this protocol expect thoughts only if they have asked for them."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        kwargs: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if self.output_config is not None and self.output_config.effort is not None:
            kwargs["reasoning_effort"] = self.output_config.effort
        return kwargs

    def prompt(self, tools: ToolUse) -> ChatPrompt:
        messages = for_template(self.system, self.messages)
        return ChatPrompt(messages, self.template_kwargs, tools.for_template())


class CountTokensBody(PromptBody):
    pass


class MessagesBody(PromptBody):
    """With `max_tokens` 0 no answer is generated: the prompt is computed, and its KV is kept for the next request."""

    max_tokens: CountOrZero
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_NO_EFFECT)
    inference_geo: str | None = Field(None, description=_NO_EFFECT)
    diagnostics: dict[str, Any] | None = Field(None, description=_NO_EFFECT)

    container: NotSupported = None
    fallback_credit_token: NotSupported = None
    fallbacks: NotSupported = None
    thread: NotSupported = None

    @property
    def user_id(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id

    def check(self) -> None:
        """Raises ServiceError for errors that no single field shows."""
        if isinstance(self.messages[-1], AssistantMessage):
            param = f"messages[{len(self.messages) - 1}]"
            raise refusal(
                f"{param}: the last message is the assistant's, and going on with its words (a prefill) is not "
                "supported; end with a user's message.",
                param,
            )

    def sampling(self, model: ModelInfo) -> SamplingParams:
        return base_sampling(model, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def held_answer(self) -> HeldAnswer | None:
        """The schema that the answer is held to. Raises ServiceError, which names the field."""
        in_config = None if self.output_config is None else self.output_config.format
        if in_config is not None and self.output_format is not None:
            raise refusal("output_format: output_config.format already says it.", "output_format")
        wanted = in_config or self.output_format
        if wanted is None:
            return None
        param = "output_format.schema" if in_config is None else "output_config.format.schema"
        return HeldAnswer(schema_constraint(wanted.json_schema, param), param)
