"""What a front end says of the model, and the names that it answers to, follow the replicas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from serving.background import BackgroundTasks
from serving.front.cluster_client import ClusterClient
from serving.front.http import create_http_app
from serving.front.ingress import Ingress, _first_model
from serving.front.served_model import served_model
from serving.settings.config import parse_args
from serving.wire.calls import AnyCall, GetModelInfo
from serving.wire.turns import ModelInfo, SamplingDefaults
from tests.unit.serving.local_service import MODEL, client_of
from tests.unit.serving.replica_rig import running_rig

FORMER = replace(
    MODEL,
    model_id="former",
    model_path="/models/former",
    aliases=("chat",),
    adapters={"new": "org/a"},
    reasoning="think",
)
NEW = replace(
    MODEL,
    model_id="new",
    model_path="/models/new",
    aliases=("latest",),
    max_context_len=1000 * MODEL.max_context_len,
    created=MODEL.created + 60,
    sampling=SamplingDefaults(temperature=0.6),
)


class UpdatedReplicas:
    """ReplicaCalls of a cluster that is being updated. `models` are those of the replicas that are listed and answer,
    `newcomers` those of replicas that are listed when the controller is asked again."""

    def __init__(self, *models: ModelInfo) -> None:
        self.models = list(models)
        self.newcomers: list[ModelInfo] = []
        self.times_asked = 0

    async def learn(self) -> None:
        self.models += self.newcomers
        self.newcomers.clear()

    async def broadcast(self, call: AnyCall, _timeout_s: float) -> list[ModelInfo]:
        assert isinstance(call, GetModelInfo)
        self.times_asked += 1
        return self.models


def client_over(replicas: UpdatedReplicas) -> ClusterClient:
    unused: dict[str, Any] = dict.fromkeys(
        ("siblings", "controller", "owners", "dispatcher", "places", "metrics")
    )
    parts: dict[str, Any] = {"replicas": replicas, "tasks": BackgroundTasks()}
    return ClusterClient(model=FORMER, settings={}, **parts, **unused)


async def test_a_front_end_that_asked_a_former_replica_learns_of_the_new_model() -> None:
    """It kept the former model's context, sampling defaults and formats of thoughts and calls as long as it ran."""
    replicas = UpdatedReplicas()
    client = client_over(replicas)
    await client.learn_model()
    assert client.model == FORMER, "no replica answers"
    replicas.models = [NEW]
    await client.learn_model()
    assert client.model == NEW


@pytest.mark.parametrize("models", [(FORMER, NEW), (NEW, FORMER)])
async def test_of_replicas_that_differ_the_newest_counts(models: tuple[ModelInfo, ...]) -> None:
    replicas: Any = UpdatedReplicas(*models)
    assert await served_model(replicas, 1.0) == NEW


async def test_a_name_is_answered_while_its_model_is_served() -> None:
    """The names were those of the front end's own settings. So the former model answered to the name of the new one,
    and its own name got a 404, until the new one was loaded. Here the new name was an adapter of the former model."""
    replicas: Any = UpdatedReplicas(FORMER)
    assert await _first_model(replicas) == FORMER
    client = client_over(replicas)

    async def named() -> dict[str, str]:
        """What each name stands for; 404 is left out."""
        names = ("former", "chat", "new", "latest")
        replies = {name: await http.get(f"/v1/models/{name}") for name in names}
        return {name: reply.json()["root"] for name, reply in replies.items() if reply.status_code != 404}

    async with client_of(create_http_app(client)) as http:
        assert await named() == {"former": "/models/former", "chat": "/models/former", "new": "org/a"}
        replicas.models = [FORMER, NEW]
        await client.learn_model()
        assert await named() == {"new": "/models/new", "latest": "/models/new"}


SAYS = [{"role": "user", "content": "Hi"}]
NAMING = {
    "/v1/chat/completions": {"model": "latest", "messages": SAYS},
    "/v1/completions": {"model": "latest", "prompt": "Hi"},
    "/v1/responses": {"model": "latest", "input": "Hi"},
    "/v1/responses/input_tokens": {"model": "latest", "input": "Hi"},
    "/v1/messages": {"model": "latest", "max_tokens": 1, "messages": SAYS},
    "/v1/messages/count_tokens": {"model": "latest", "messages": SAYS},
    "/v1/tokenize": {"model": "latest", "prompt": "Hi"},
    "/v1/detokenize": {"model": "latest", "tokens": [1]},
    "/generate": {"lora_path": "latest", "text": "Hi"},
}


@pytest.mark.parametrize("path", NAMING)
async def test_the_replicas_are_asked_before_a_name_is_refused(path: str) -> None:
    """For two seconds after an update, a front end answered 404 to a name that a replica served."""
    replicas = UpdatedReplicas(FORMER)
    client = client_over(replicas)
    async with client_of(create_http_app(client)) as http:
        reply = await http.post(path, json=NAMING[path])
    assert reply.status_code == (400 if path == "/generate" else 404)
    assert "'latest' does not exist" in reply.text
    assert replicas.times_asked == 1


async def test_a_name_that_an_update_has_just_brought_is_known() -> None:
    replicas = UpdatedReplicas(FORMER)
    client = client_over(replicas)
    async with client_of(create_http_app(client)) as http:
        replicas.newcomers.append(NEW)
        reply = await http.get("/v1/models/latest")
    assert reply.json()["root"] == "/models/new"


async def test_bodies_may_be_as_large_as_the_learned_model_takes() -> None:
    """They could be as large as the context of the replica allowed that the front end had asked when it started."""
    replicas = UpdatedReplicas(NEW)
    client = client_over(replicas)
    ingress: Any = SimpleNamespace(_args=parse_args({"model": {"path": "org/new"}}), _service=client)
    limits = Ingress._rules(ingress).body_limits
    before = limits()
    await client.learn_model()
    assert limits().size_bytes > before.size_bytes
    assert limits().values - before.values == 2 * (NEW.max_context_len - FORMER.max_context_len)


async def test_a_replica_tells_all_names_of_its_model(tmp_path: Path) -> None:
    model = {"path": "org/base", "name": "base", "aliases": ["small"], "adapters": {"pirate": "org/pirate"}}
    async with running_rig(tmp_path, settings={"model": model}) as rig:
        told = await rig.calls.answer(GetModelInfo())
    assert (told.model_id, told.aliases, told.adapters) == ("base", ("small",), {"pirate": "org/pirate"})
