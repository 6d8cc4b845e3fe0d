"""Texts to token ids and back, in the form of vLLM's and SGLang's clients: /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag

from serving.front.api.answers.tools_schema import Tools
from serving.front.api.dependencies import Service
from serving.front.api.errors import refusal
from serving.front.api.fields import MAX_CALLS, check_token_ids, one_or_many, one_or_many_lists
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.openai.chat_schema import Messages
from serving.front.api.reply_json import reply_json
from serving.front.api.shared_fields import TemplateKwargs
from serving.front.api.strict_json import NotSupported, StrictBody, StrictJsonRoute
from serving.front.api.turn_streams import beside_streams
from serving.wire.turns import ChatPrompt, TextPrompt

Texts = Annotated[
    Annotated[str, Tag("<one>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CALLS), Tag("<many>")],
    Discriminator(one_or_many),
]
Ids = Annotated[list[int], Field(fail_fast=True)]
TokenLists = Annotated[
    Annotated[Ids, Tag("<one>")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CALLS), Tag("<many>")],
    Discriminator(one_or_many_lists),
]


class TokenizeBody(StrictBody):
    """Send either `prompt` or `messages`. The tokenizer adds special tokens to a `prompt`, unless `add_special_tokens`
    is false. `messages` have only the special tokens that the chat template writes."""

    model: str | None = None
    prompt: Texts | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    chat_template: NotSupported = None
    mm_processor_kwargs: NotSupported = None

    def prompts(self) -> list[TextPrompt | ChatPrompt]:
        """The prompts to tokenize. Raises ServiceError, which names the field."""
        if self.messages is not None:
            if self.prompt is not None:
                raise refusal("prompt: give either prompt or messages.", "prompt")
            if self.add_special_tokens:
                raise refusal(
                    "add_special_tokens: the chat template writes those of messages.", "add_special_tokens"
                )
            messages = tuple(message.for_template() for message in self.messages)
            tools = tuple(tool.for_template() for tool in self.tools or ())
            return [
                ChatPrompt(
                    messages,
                    self.chat_template_kwargs or {},
                    tools,
                    opens_answer=self.add_generation_prompt is not False,
                    continues_final=bool(self.continue_final_message),
                )
            ]
        if self.prompt is None:
            raise refusal("prompt: give either prompt or messages.", "prompt")
        for param in ("tools", "chat_template_kwargs"):
            if getattr(self, param):
                raise refusal(f"{param}: only allowed with messages.", param)
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [TextPrompt(text, self.add_special_tokens is not False) for text in texts]


class DetokenizeBody(StrictBody):
    """Unless `skip_special_tokens` is true, special tokens are part of the text."""

    model: str | None = None
    tokens: TokenLists
    skip_special_tokens: bool | None = None


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["tokens"])
    for prefix in ("", "/v1"):
        router.add_api_route(f"{prefix}/tokenize", tokenize, methods=["POST"])
        router.add_api_route(f"{prefix}/detokenize", detokenize, methods=["POST"])
    return router


async def tokenize(body: TokenizeBody, service: Service) -> Response:
    """For several texts, `tokens`, `count` and `token_strs` are lists with one entry for each text."""
    model = await model_for(service, body.model)
    adapter_of(body.model, model)
    found = [
        await service.tokenize(prompt, with_token_strs=bool(body.return_token_strs))
        for prompt in await beside_streams(body.prompts, len(body.messages or ()))
    ]
    many = isinstance(body.prompt, list)
    reply: dict[str, Any] = {
        "tokens": [tokenized.token_ids for tokenized in found],
        "count": [len(tokenized.token_ids) for tokenized in found],
        "token_strs": [tokenized.token_strs for tokenized in found] if body.return_token_strs else None,
    }
    whole = {name: value if many or value is None else value[0] for name, value in reply.items()}
    # A text may have a million tokens: FastAPI would take six times as long to write them.
    text = reply_json(whole | {"max_model_len": model.max_context_len})
    return Response(text, media_type="application/json")


async def detokenize(body: DetokenizeBody, service: Service) -> dict[str, Any]:
    """The text, or a list of texts: as `prompt`, vLLM's name for it, and as `text`, SGLang's."""
    model = await model_for(service, body.model)
    adapter_of(body.model, model)
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Sequence[Any] = body.tokens if many else [body.tokens]
    for index, token_ids in enumerate(lists):
        check_token_ids(token_ids, model, f"tokens[{index}]" if many else "tokens")
    skip = bool(body.skip_special_tokens)
    texts = [await service.detokenize(token_ids, skip_special_tokens=skip) for token_ids in lists]
    text = texts if many else texts[0]
    return {"text": text, "prompt": text}
