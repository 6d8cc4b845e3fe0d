"""Fields of a call, from the bodies of chat and text completions. Refuses rarer fields that exclude each other.

A session already has its history. So fields that would cut it, salt it or render it differently are refused there.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

from serving.front.api.affinity import AffinityKeys
from serving.front.api.errors import refusal
from serving.front.api.fields import check_min_tokens, stop_strings
from serving.front.api.named_model import adapter_of
from serving.front.api.openai.chat_schema import ChatBody
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.priorities import engine_priority
from serving.front.api.rules import ApiRules
from serving.wire.turns import ModelInfo, SessionTurn

WHOLE_CONTEXT = -1
_NOT_IN_SESSIONS = (
    "truncate_prompt_tokens",
    "cache_salt",
    "chat_template",
    "continue_final_message",
    "add_special_tokens",
)


def call_fields(
    request: Request,
    rules: ApiRules,
    body: OpenAiBody,
    session: SessionTurn | None,
    tenant: str,
    model: ModelInfo,
) -> dict[str, Any]:
    """Fields of a TurnCall that are the same for each choice. Raises ServiceError, which names the field."""
    most, most_field = body.most_tokens(model)
    check_min_tokens(body.min_tokens or 0, most, "min_tokens", most_field)
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("prompt_logprobs: not told in streams.", "prompt_logprobs")
    if session is not None:
        _check_session(body)
    return {
        "session": session,
        "tenant": tenant,
        "priority": engine_priority(rules.request_priority, lower_first=body.priority),
        "sampling": body.sampling(model),
        "stop": stop_strings(body.stop),
        "trim_stop": not body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens is not False,
        "max_new_tokens": most,
        "bad_words": tuple(body.bad_words or ()),
        "keep_last": _kept(body.truncate_prompt_tokens, most, model),
        "cache_salt": body.cache_salt or "",
        "adapter": adapter_of(body.model, model),
        "affinity_key": AffinityKeys.of(request).key(body.prompt_cache_key, body.user),
    }


def chat_prompt_fields(body: ChatBody, *, own_template: bool) -> dict[str, Any]:
    """Fields of a ChatPrompt. `own_template`: a request may bring one. Raises ServiceError, which names the field."""
    if body.continue_final_message and body.add_generation_prompt:
        param = "continue_final_message"
        raise refusal(f"{param}: an answer cannot be opened (add_generation_prompt) then.", param)
    if body.chat_template is not None and not own_template:
        raise refusal(
            "chat_template: not taken here; the setting api.request_chat_template allows it.",
            "chat_template",
            code="unsupported_field",
        )
    return {
        "opens_answer": body.add_generation_prompt is not False,
        "continues_final": bool(body.continue_final_message),
        "template": body.chat_template,
        "add_special_tokens": bool(body.add_special_tokens),
    }


def _check_session(body: OpenAiBody) -> None:
    for param in _NOT_IN_SESSIONS:
        # In text completions add_special_tokens only concerns a fresh sequence.
        if getattr(body, param, None) and (isinstance(body, ChatBody) or param != "add_special_tokens"):
            raise refusal(f"{param}: not possible in a session.", param)
    if isinstance(body, ChatBody) and body.add_generation_prompt is False:
        param = "add_generation_prompt"
        raise refusal(f"{param}: a session's turn opens an answer.", param)


def _kept(count: int | None, most_tokens: int | None, model: ModelInfo) -> int | None:
    if count == 0:
        raise refusal("truncate_prompt_tokens: a prompt keeps at least one token.", "truncate_prompt_tokens")
    if count == WHOLE_CONTEXT:
        return max(1, model.max_context_len - max(1, most_tokens or 1))
    return count
