"""OpenAI's /v1/models."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from serving.front.api.dependencies import Service
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.strict_json import StrictJsonRoute
from serving.wire.turns import ModelInfo


class ModelCard(BaseModel):
    """A served model; `max_model_len` (tokens), `root` and `parent` are vLLM's. An adapter has a parent."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kedge"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    return router


async def list_models(service: Service) -> ModelList:
    """The served model, under its own name first, then under its aliases, and its adapters."""
    model = service.model
    names = (model.model_id, *model.aliases, *model.adapters)
    return ModelList(data=[_card(model, name) for name in names])


async def get_model(model_id: str, service: Service) -> ModelCard:
    model = await model_for(service, model_id)
    adapter_of(model_id, model)
    return _card(model, model_id)


def _card(model: ModelInfo, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        root=model.adapters.get(name, model.model_path),
        parent=model.model_id if name in model.adapters else None,
        max_model_len=model.max_context_len,
    )
