"""A turn's attributes under OpenTelemetry's semantic conventions for generative AI, and under vLLM's additions to them.

The names are repeated here because the package that has them marks them as incubating and moves them.
"""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.util.types import AttributeValue

from controllers.session_keys import id_in
from serving.wire.turns import ChatPrompt, TextPrompt, TurnCall, TurnEvent

FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
IN_QUEUE = "gen_ai.latency.time_in_queue"
IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
IN_DECODE = "gen_ai.latency.time_in_model_decode"
FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
END_TO_END = "gen_ai.latency.e2e"
"""A replica's latencies, in seconds, under vLLM's names."""


def operation_of(call: TurnCall) -> str:
    return "chat" if isinstance(call.prompt, ChatPrompt) else "text_completion"


def request_attributes(call: TurnCall, model: str) -> dict[str, AttributeValue]:
    """What was asked for, without any content."""
    sampling, served = call.sampling, call.adapter or model
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation_of(call),
        "gen_ai.provider.name": "kedge",
        "gen_ai.request.model": served,
        "gen_ai.request.max_tokens": call.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": call.seed,
        "gen_ai.response.id": call.request_id,
        "gen_ai.response.model": served,
        "gen_ai.conversation.id": conversation_of(call),
        "kedge.tenant": call.tenant or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def conversation_of(call: TurnCall) -> str | None:
    return None if call.session is None else id_in(call.session.session_id)


def usage_attributes(event: TurnEvent) -> dict[str, AttributeValue]:
    """Usage from a turn's last event. Cached tokens count as input, too."""
    found: dict[str, AttributeValue | None] = {
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "gen_ai.usage.output_tokens": event.completion_tokens,
        "kedge.turn": event.turn_index,
        "kedge.replayed": event.replayed or None,
    }
    if event.finish is not None:
        found[FINISH_REASONS] = [event.finish.reason]
    return {name: value for name, value in found.items() if value is not None}


def input_messages(call: TurnCall) -> str:
    """The prompt as JSON, for operators who turn on recording of content."""
    match call.prompt:
        case ChatPrompt():
            told = [_message(each["role"], each.get("content")) for each in call.prompt.messages]
        case TextPrompt():
            told = [_message("user", call.prompt.text)]
        case _:
            told = [_message("user", list(call.prompt.token_ids))]
    return json.dumps(told, ensure_ascii=False)


def output_messages(text: str, event: TurnEvent) -> str:
    reason = None if event.finish is None else event.finish.reason
    return json.dumps([_message("assistant", text) | {"finish_reason": reason}], ensure_ascii=False)


def _message(role: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": role, "parts": [{"type": "text", "content": text}]}
