"""OpenAI's /v1/responses/input_tokens: how many tokens a response would have as its input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from serving.front.api.answers.held import field_names
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.responses.conversation_log import goes_on_from
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.schema import ResponsesBody, check_state
from serving.front.api.turn_streams import beside_streams
from serving.wire.turns import ChatPrompt, ModelInfo


async def count_input_tokens(
    body: ResponsesBody,
    service: Service,
    tenant: Tenant,
) -> dict[str, Any]:
    """The tokens of the prompt as the chat template renders it, up to where the answer begins, with all that the body
    goes on from."""
    model = await model_for(service, body.model)
    adapter_of(body.model, model)
    check_state(body)
    before = await goes_on_from(service, body, tenant)
    make_prompt = partial(_prompt, body, before.items, model)
    said, prompt = await beside_streams(make_prompt, len(before.items) + len(body.input))
    with field_names("input", None, of_message=partial(before.name_of_message, body, said)).in_errors():
        tokenized = await service.tokenize(prompt, with_token_strs=False)
    return {"object": "response.input_tokens", "input_tokens": len(tokenized.token_ids)}


def _prompt(body: ResponsesBody, before: Sequence[Json], model: ModelInfo) -> tuple[list[Json], ChatPrompt]:
    """All that is said in the prompt, and the prompt."""
    said = [*before, *canonical_items(body.input, "")]
    return said, body.chat_prompt(said, body.offered_tools(model).use)
