"""Large answers are written a little at a time where writing is slow. The bytes are the same as if written at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api import reply_json
from serving.front.api.reply_json import filled, joined_items, list_items
from serving.front.api.sessions import replies as session_replies
from serving.front.http import create_http_app
from tests.unit.serving.local_service import client_of, local_service

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 5,
    },
    "/v1/completions": {"prompt": "hi there", "max_tokens": 40, "n": 3, "logprobs": 5, "echo": True},
    "/generate": {
        "text": "hi there",
        "sampling_params": {"max_new_tokens": 40, "n": 3},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
        "return_text_in_logprobs": True,
    },
}
CHANGING = {"id", "created", "e2e_latency", "cached_tokens"}


def comparable(value: Any) -> Any:
    """The value without the fields that differ between any two answers."""
    match value:
        case dict():
            return {name: comparable(each) for name, each in value.items() if name not in CHANGING}
        case list():
            return [comparable(each) for each in value]
    return value


def greedy(path: str, **more: Any) -> dict[str, Any]:
    asked = ASKED[path] | more
    if path != "/generate":
        return asked | {"temperature": 0, "ignore_eos": True}
    return asked | {"sampling_params": asked["sampling_params"] | {"temperature": 0, "ignore_eos": True}}


async def told(client: httpx.AsyncClient, path: str, *, stream: bool) -> Any:
    reply = await client.post(path, json=greedy(path, stream=stream))
    assert reply.status_code == 200, reply.text
    if not stream:
        return comparable(reply.json())
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return comparable([json.loads(event) for event in events if event != "[DONE]"])


@pytest.mark.parametrize("path", ASKED)
async def test_an_answer_is_the_same_however_little_is_written_at_a_time(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    at_once = await told(client, path, stream=False)
    monkeypatch.setattr(reply_json, "ENTRIES_AT_ONCE", 3)
    assert await told(client, path, stream=False) == at_once
    assert "logprob" in json.dumps(at_once)


async def test_each_event_of_generate_tells_all_log_probabilities_so_far(tmp_path: Path) -> None:
    async with (
        local_service(tmp_path) as service,
        client_of(create_http_app(service)) as client,
    ):
        whole = await told(client, "/generate", stream=False)
        events = await told(client, "/generate", stream=True)
    for choice, reply in enumerate(whole):
        (*_, last) = (event for event in events if event["index"] == choice)
        assert last["meta_info"] == reply["meta_info"]
        lengths = [
            len(event["meta_info"]["output_token_logprobs"]) for event in events if event["index"] == choice
        ]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 40


async def test_events_that_tell_everything_so_far_are_fewer_once_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of 4,000 tokens with twenty log-probabilities each used to send its client 4 GB, and took all of the
    machine's memory."""
    monkeypatch.setattr(session_replies, "LARGE_EVENT_BYTES", 4096)
    async with (
        local_service(tmp_path) as service,
        client_of(create_http_app(service)) as client,
    ):
        sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
        asked = ASKED["/generate"] | {"sampling_params": sampling}
        whole = (await client.post("/generate", json=asked)).json()
        reply = await client.post("/generate", json=asked | {"stream": True})
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    assert comparable(json.loads(events[-1])) == comparable(whole)
    assert sum(map(len, events)) < 24 * len(events[-1])  # 4 KiB of small events, then 17 times the last one


async def test_others_are_served_while_a_large_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing an answer with 128 choices used to hold the front end's event loop for 0.3 s."""
    monkeypatch.setattr(reply_json, "ENTRIES_AT_ONCE", 10)
    most_between = since = 0

    def shape(entry: int) -> int:
        nonlocal most_between, since
        since += 1
        most_between = max(most_between, since)
        return entry

    async def others() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    choices = [await list_items(range(number), shape) for number in (95, 1, 1, 1)]
    running.cancel()
    assert json.loads(b"[%s]" % choices[0]) == list(range(95))
    assert most_between == 10


def test_items_are_filled_in_by_name_whatever_strings_say() -> None:
    text = json.dumps({"text": '"top":[]', "top": [], "other": []}, separators=(",", ":")).encode()
    assert json.loads(filled(text, "top", b'"top",1')) == {"text": '"top":[]', "top": ["top", 1], "other": []}
    assert joined_items([b"1,2", b"", b"3"]) == b"1,2,3"
