"""The model that a request names."""

from __future__ import annotations

from serving.front.api.errors import refusal
from serving.front.api.service import TurnService
from serving.wire.turns import ModelInfo


async def model_for(service: TurnService, *names: str | None) -> ModelInfo:
    """What is served, for a request that names `names`. If one of them is unknown, the replicas are asked first: an
    update may just have brought it."""
    if any(_adapter(name, service.model) is None for name in names):
        await service.learn_model()
    return service.model


def adapter_of(name: str | None, model: ModelInfo) -> str:
    """The adapter that a request names as its model; "" for the served model itself, which is also what None means.
    Raises ServiceError for a model that is not served."""
    adapter = _adapter(name, model)
    if adapter is None:
        told = f"The model {str(name)[:120]!r} does not exist. The model here is {model.model_id!r}."
        raise refusal(told, "model", status=404, code="model_not_found")
    return adapter


def _adapter(name: str | None, model: ModelInfo) -> str | None:
    """None if no such model is served."""
    if name is None or name == model.model_id or name in model.aliases:
        return ""
    return name if name in model.adapters else None
