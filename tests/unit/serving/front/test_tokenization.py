"""/tokenize and /detokenize: the very tokens of a turn, with the field names of vLLM's and SGLang's clients."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import MODEL, LocalService
from tests.unit.serving.replica_rig import WAIT_S

HELLO = [{"role": "user", "content": "My dog is called Rex."}]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("body", [{"prompt": "My dog"}, {"messages": HELLO}])
async def test_the_tokens_are_those_of_a_turn(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage = (await post(client, path, **body, max_tokens=1))["usage"]
    tokens = await post(client, "/tokenize", **body)
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    assert tokens["max_model_len"] == MODEL.max_context_len
    said = await post(client, "/v1/completions", prompt=tokens["tokens"], max_tokens=4, temperature=0)
    same = await post(client, path, **body, max_tokens=4, temperature=0)
    assert said["usage"]["completion_tokens"] == same["usage"]["completion_tokens"]
    assert said["choices"][0]["text"] == (
        same["choices"][0]["message"]["content"] if "messages" in body else same["choices"][0]["text"]
    )


async def test_there_and_back(client: httpx.AsyncClient) -> None:
    text = "My dog is called Rex. 🐕 <|im_end|>"
    there = await post(client, "/v1/tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
    assert len(there["token_strs"]) == there["count"]
    back = await post(client, "/v1/detokenize", tokens=there["tokens"])
    assert back == {"text": text, "prompt": text}
    skipped = await post(client, "/detokenize", tokens=there["tokens"], skip_special_tokens=True)
    specials = [token for token in there["token_strs"] if token.startswith("<|")]
    assert skipped["text"] == (text.replace("<|im_end|>", "") if specials else text)
    assert (await post(client, "/detokenize", tokens=[]))["text"] == ""


async def test_several_at_once(client: httpx.AsyncClient) -> None:
    texts = ["My dog", "", "is called Rex"]
    many = await post(client, "/tokenize", prompt=texts)
    ones = [await post(client, "/tokenize", prompt=text) for text in texts]
    assert many["tokens"] == [one["tokens"] for one in ones]
    assert many["count"] == [one["count"] for one in ones]
    back = await post(client, "/detokenize", tokens=many["tokens"], skip_special_tokens=True)
    assert back["text"] == texts


async def test_tools_are_part_of_the_messages_tokens(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "find_dog"}}
    note = {"type": "custom", "custom": {"name": "take_note"}}
    plain = await post(client, "/tokenize", messages=HELLO)
    shown = await post(client, "/tokenize", messages=HELLO, tools=[tool, note])
    assert shown["count"] >= plain["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a" * 1_000_000}, "prompt"),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [-1]]}, "tokens[1]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or error["code"] in ("context_length_exceeded", "model_not_found"), error


async def test_without_a_tokenizer_both_are_refused(service: LocalService, client: httpx.AsyncClient) -> None:
    text = service.rig.builder._text
    assert text.tokenizer is not None, "the rig has one"
    service.rig.builder._text = type(text)(None, vocab_size=1000, max_context_len=100)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        error = (await client.post(path, json=body)).json()["error"]
        assert "no tokenizer" in error["message"]


async def test_the_version_the_ping_and_the_load(client: httpx.AsyncClient) -> None:
    version = (await client.get("/version")).json()["version"]
    assert version.split(".")[0].isdecimal()
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 200
    (load,) = (await client.get("/get_load")).json()
    assert load["num_reqs"] == load["num_waiting_reqs"] == load["num_tokens"] == 0
    headers = {"x-session-id": "s"}
    asked = {"prompt": "My dog", "max_tokens": 20, "ignore_eos": True}
    assert (await client.post("/v1/completions", json=asked, headers=headers)).status_code == 200
    async with asyncio.timeout(WAIT_S):  # figures are published a few times a second
        while load["num_reqs"] or not load["num_tokens"]:
            await asyncio.sleep(0.05)
            (load,) = (await client.get("/get_load")).json()
