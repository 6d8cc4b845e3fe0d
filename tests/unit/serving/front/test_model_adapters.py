"""Adapters are models of their own for clients: every protocol takes their names, and replies with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from serving.front.known_places import KnownPlaces
from serving.settings.config import parse_args
from serving.settings.strict_settings import SettingsError
from serving.wire.turns import ChatPrompt
from tests.unit.serving.front.test_durable_conversations import asked
from tests.unit.serving.local_service import MODEL, LocalService, local_client

ADAPTERS = {"a": "adapters/a", "b": "org/b"}
MESSAGES = [{"role": "user", "content": "a dog"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "a dog", "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "a dog", "max_output_tokens": 2},
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    async with local_client(tmp_path) as (client, service):
        service.model = replace(MODEL, adapters=ADAPTERS, aliases=("small",))
        yield client, service


@pytest.mark.parametrize("path", BODIES)
async def test_an_adapter_is_named_as_the_model(
    served: tuple[httpx.AsyncClient, LocalService], path: str
) -> None:
    client, service = served
    for name, adapter, told in (("a", "a", "a"), ("small", "", MODEL.model_id), ("b", "b", "b")):
        reply = await client.post(path, json={"model": name, **BODIES[path]})
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == told
        assert service.calls[-1].adapter == adapter
        stream = await client.post(path, json={"model": name, "stream": True, **BODIES[path]})
        assert f'"model":"{told}"' in stream.text
        assert service.calls[-1].adapter == adapter
    refused = await client.post(path, json={"model": "c", **BODIES[path]})
    assert refused.status_code == 404
    assert "'c' does not exist" in refused.text
    assert f"The model here is {MODEL.model_id!r}" in refused.text, "it names what was expected"


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
async def test_an_adapter_has_the_model_s_tokens(
    served: tuple[httpx.AsyncClient, LocalService], path: str
) -> None:
    client, _ = served
    body = {"messages": MESSAGES} if "messages" in path else {"prompt": "a dog"}
    replies = [await client.post(path, json={"model": name, **body}) for name in ("a", MODEL.model_id)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json() == replies[1].json()


async def test_adapters_are_listed_with_their_model(
    served: tuple[httpx.AsyncClient, LocalService],
) -> None:
    client, _ = served
    cards = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        (MODEL.model_id, None, MODEL.model_path),
        ("small", None, MODEL.model_path),
        ("a", MODEL.model_id, "adapters/a"),
        ("b", MODEL.model_id, "org/b"),
    ]
    for card in cards:
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card


async def test_a_response_is_kept_with_its_model(served: tuple[httpx.AsyncClient, LocalService]) -> None:
    """Also once the adapter is no longer served."""
    client, service = served
    body = {"model": "a", **BODIES["/v1/responses"]}
    first = (await client.post("/v1/responses", json=body)).json()
    after = (await client.post("/v1/responses", json=body | {"previous_response_id": first["id"]})).json()
    assert service.calls[-1].adapter == "a"
    assert after["usage"]["input_tokens_details"]["cached_tokens"] > 0
    service.model = MODEL
    for response in (first, after):
        assert (await client.get(f"/v1/responses/{response['id']}")).json()["model"] == "a"


async def test_sglang_names_adapters_in_lora_path(served: tuple[httpx.AsyncClient, LocalService]) -> None:
    client, service = served
    sampling = {"max_new_tokens": 2, "n": 2}
    for text, lora_path, adapters in (
        ("a dog", "a", ["a", "a"]),
        (["a dog", "a cat", "a cow"], ["a", None, "b"], ["a", "a", "", "", "b", "b"]),
        (["a dog", "a cat"], "b", ["b"] * 4),
        ("a dog", None, ["", ""]),
    ):
        body = {"text": text, "lora_path": lora_path, "sampling_params": sampling}
        assert (await client.post("/generate", json=body)).status_code == 200
        assert [call.adapter for call in service.calls[-len(adapters) :]] == adapters
    for lora_path in ("c", ["a"], [MODEL.model_id] * 2, 5, ["a", 3]):
        body = {"text": ["a dog", "a cat"], "lora_path": lora_path}
        refused = await client.post("/generate", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("lora_path")


async def test_a_refusal_of_a_replica_names_lora_path(
    served: tuple[httpx.AsyncClient, LocalService],
) -> None:
    """It named `model`, a field that /generate does not have."""
    client, service = served
    service.model = replace(MODEL, adapters={"new": "org/new"})  # the replica does not have it
    refused = await client.post("/generate", json={"text": "a dog", "lora_path": "new"})
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("adapter_not_loaded", "lora_path")
    refused = await client.post("/v1/completions", json={"model": "new", **BODIES["/v1/completions"]})
    assert refused.json()["error"]["param"] == "model"


def test_a_conversation_with_an_adapter_is_another_one() -> None:
    """A replica that has it with one adapter has nothing of it with another."""
    places = KnownPlaces(100, durable_timeout_s=60.0)
    found = [places.recognized(asked("Hello", "Hi", "More", adapter=name)) for name in ("", "a", "b")]
    places = []
    for call in found:
        assert isinstance(call.prompt, ChatPrompt)
        places.append({said.digest for said in call.prompt.said})
    assert not places[0] & places[1]
    assert not places[1] & places[2]
    assert len({call.session.session_id for call in found if call.session is not None}) == 3


@pytest.mark.parametrize("mode", ["full", "auto"])
async def test_a_session_tells_only_what_is_new_after_a_change_of_its_adapter(
    served: tuple[httpx.AsyncClient, LocalService], mode: str
) -> None:
    """No message was recognized after a change, so the log had the whole conversation once more."""
    client, service = served
    headers = {"x-session-id": "s", "x-session-mode": mode}
    said: list[dict[str, Any]] = []
    for adapter in ("a", "b", MODEL.model_id, "a"):
        said.append({"role": "user", "content": f"answer, {adapter}"})
        body = {"model": adapter, "messages": said, "max_tokens": 3}
        reply = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        said.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
    turns = await service.transcript("s", tenant="")
    told = [(turn.said.num_kept, len(turn.said.messages)) for turn in turns]
    assert told == [(0, 1), (1, 2), (3, 2), (5, 2)]


def test_adapters_are_named_once_and_are_there(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    model: dict[str, Any] = {"path": "assets/models/kedge-chat", "aliases": ["other"]}
    args = parse_args({"model": {**model, "adapters": {"mine": str(tmp_path), "theirs": "org/theirs"}}})
    (mine, theirs) = args.model.settings().adapters
    assert (mine.name, mine.path) == ("mine", str(tmp_path))
    assert (theirs.name, theirs.path) == ("theirs", "org/theirs")
    for name, path, told in (
        ("kedge-chat", "org/a", "a name of the model itself"),
        ("other", "org/a", "a name of the model itself"),
        ("mine", "./nowhere", "no directory"),
        ("mine", "assets/models/kedge-chat", "no adapter_config.json"),
        ("", "org/a", "at least 1"),
        ("my adapter", "org/a", "visible ASCII"),
        ("n\u00e4her", "org/a", "visible ASCII"),
        ("a" * 257, "org/a", "at most 256"),
        ("mine", "", "at least 1"),
    ):
        with pytest.raises(SettingsError, match=rf"model\.adapters.*{told}"):
            parse_args({"model": {**model, "adapters": {name: path}}})


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"execution": {"linear": "torch"}}, "linear 'auto'"),
        ({"execution": {"attention": "torch"}}, "attention 'cpu'"),
        ({"execution": {"tensor_parallel": 2}}, "tensor_parallel 1"),
    ],
)
def test_settings_that_adapters_cannot_have_are_refused(section: dict[str, Any], told: str) -> None:
    model = {"path": "assets/models/kedge-chat", "adapters": {"mine": "org/mine"}}
    with pytest.raises(SettingsError, match=rf"model\.adapters need {told}"):
        parse_args({"model": model, **section})


def test_adapters_need_a_cpu_and_no_draft_model_has_any() -> None:
    model = {"path": "assets/models/kedge-chat", "adapters": {"mine": "org/mine"}}
    with pytest.raises(SettingsError, match=r"model\.adapters need a CPU"):
        parse_args({"model": {**model, "device": "cuda"}})
    with pytest.raises(SettingsError, match="a draft model has no adapters"):
        parse_args(
            {"model": {"path": model["path"]}, "speculation": {"method": "draft", "draft_model": model}}
        )
