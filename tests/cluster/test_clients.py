"""Clients that connect, leave, stay idle or send invalid requests."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from served_cluster import ServedCluster, eventually
from session_client import Conversation


def long_turn(session: Conversation) -> dict[str, Any]:
    return {
        "input_ids": [410, 411],
        "stream": True,
        "rid": f"long-{session.session_id}",
        "sampling_params": {"max_new_tokens": 6000, "temperature": 0, "ignore_eos": True},
        "session_params": {"id": session.session_id},
    }


@pytest.mark.parametrize("chunks_read", [1, 20])
def test_disconnect_leaves_no_trace(cluster: ServedCluster, client: httpx.Client, chunks_read: int) -> None:
    session = Conversation.open(client)
    session.turn([400, 401, 402, 403])
    with cluster.client() as leaving, leaving.stream("POST", "/generate", json=long_turn(session)) as reply:
        for number, _ in enumerate(reply.iter_lines()):
            if number >= chunks_read:
                break
    eventually(cluster.nothing_runs, 10)
    session.exact_turn([405])
    session.close()


def test_a_client_that_leaves_takes_no_other_with_it(cluster: ServedCluster, client: httpx.Client) -> None:
    """All turns of a replica share one link to the ingress. It must not belong to the client that came first."""
    one, other = neighbours(client)
    body = {
        **long_turn(other),
        "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True},
    }

    def leave() -> None:
        with cluster.client() as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post("/generate", json=long_turn(one) | {"stream": False}, timeout=0.5)

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leave)
        eventually(lambda: not cluster.nothing_runs(), 10)
        with client.stream("POST", "/generate", json=body) as stayed:
            lines = stayed.iter_lines()
            next(lines)
            left.result()
            events = [line for line in lines if line]
    *events, done = [line.removeprefix("data: ") for line in events]
    assert done == "[DONE]"
    assert json.loads(events[-1])["meta_info"]["finish_reason"]["type"] == "length"
    counts = [len(json.loads(event)["output_ids"]) for event in events]
    largest = max(after - before for before, after in pairwise(counts))
    assert largest < 300, "the rest came in one piece, with the reply"
    eventually(cluster.nothing_runs, 10)
    for session in (one, other):
        session.close()


def neighbours(client: httpx.Client) -> tuple[Conversation, Conversation]:
    """Two sessions that one replica owns."""
    sessions = [Conversation.open(client) for _ in range(3)]
    entries = client.get("/v1/kedge/sessions").json()["sessions"]
    owners = {entry["session_id"]: entry["replica_id"] for entry in entries}
    pairs = [(one, other) for one in sessions for other in sessions if one is not other]
    pair = next((one, other) for one, other in pairs if owners[one.session_id] == owners[other.session_id])
    for session in sessions:
        if session not in pair:
            session.close()
    return pair


def test_disconnect_of_a_call_that_does_not_stream(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    with cluster.client() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/generate", json=long_turn(session) | {"stream": False}, timeout=0.5)
    eventually(cluster.nothing_runs, 10)
    session.turn([405])
    session.close()


def test_abort_request(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    body = long_turn(session)
    last = ""
    with cluster.client() as other, other.stream("POST", "/generate", json=body) as reply:
        for number, line in enumerate(reply.iter_lines()):
            if number == 4:
                assert client.post("/abort_request", json={"rid": body["rid"]}).status_code == 200
            if line.startswith("data: {"):
                last = line
    assert '"type":"abort"' in last.replace(" ", "")
    session.turn([402])
    session.close()


def test_idle_session_expires_but_not_during_a_turn(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client, timeout=1)
    body = long_turn(session)
    started_s = time.monotonic()
    with cluster.client() as other, other.stream("POST", "/generate", json=body) as reply:
        for _ in reply.iter_lines():
            if time.monotonic() - started_s > 3:
                assert session.session_id in cluster.sessions()
                break
    eventually(lambda: session.session_id not in cluster.sessions(), 15)
    # The ingress still remembers an owner. A call that may create the session must work all the same.
    body = {"model": "kedge-chat", "prompt": [5, 6], "max_tokens": 2}
    anew = client.post("/v1/completions", headers={"x-session-id": session.session_id}, json=body)
    assert anew.status_code == 200, anew.text
    session.close()
    refused = client.post("/generate", json={"input_ids": [1], "session_params": {"id": session.session_id}})
    assert refused.status_code == 400
    assert session.session_id in refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": []}),
        ("/generate", {"input_ids": [-1]}),
        ("/generate", {"input_ids": [10**9]}),
        ("/generate", {"input_ids": [5] * 9000}),
        ("/generate", {"input_ids": "no"}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": -4}}),
        ("/generate", {"input_ids": [5], "session_params": {"id": "unknown"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "y"}),
        ("/v1/chat/completions", {"model": "another", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"model": "kedge-chat", "prompt": "x", "temperature": -1}),
        ("/v1/completions", {"model": "kedge-chat", "prompt": "x" * 5_000_000}),
    ],
)
def test_bad_input_is_a_4xx_and_changes_no_books(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    before = client.get("/v1/kedge/audit").json()
    reply = client.post(path, json=body)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["message"]
    assert client.get("/v1/kedge/audit").json() == before


@pytest.mark.parametrize(
    "name", ["x-session-id", "x-tenant-id", "idempotency-key", "x-request-id", "traceparent"]
)
def test_header_bytes_that_are_no_utf8_are_a_400_that_names_the_header(
    client: httpx.Client, name: str
) -> None:
    """Ray reads some headers before Kedge does, and answers such bytes with a plain 500."""
    body = {"model": "kedge-chat", "prompt": "x", "max_tokens": 1}
    reply = client.post("/v1/completions", json=body, headers={name: b"\xff\xfe"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == name


def test_openai_client_in_a_session(cluster: ServedCluster) -> None:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as openai:
        model = openai.models.list().data[0].id
        headers = {"x-session-id": "openai-session"}
        total = 0
        for text in ("My dog is called Rex.", "What is my dog called?", "Thanks."):
            stream = openai.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=headers,
            )
            usage = [chunk.usage for chunk in stream if chunk.usage][-1]
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens in (total, max(0, total - 1))
            total = usage.total_tokens
        assert cluster.sessions()["openai-session"]["tokens"] == total
        with pytest.raises(BadRequestError):
            openai.completions.create(model=model, prompt="x", max_tokens=4, temperature=-1.0)
    with cluster.client() as client:
        assert client.delete("/v1/kedge/sessions/openai-session").status_code == 204


def test_openai_client_with_tools(cluster: ServedCluster) -> None:
    """A forced tool call, its result, and then the first turn again, streamed."""
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as openai:
        names = {"type": "string", "enum": ["Tom", "Rex"]}
        schema = {"type": "object", "properties": {"name": names}, "required": ["name"]}
        parameters = {**schema, "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "find_dog", "parameters": parameters}}
        session = {"x-session-id": "tools"}
        asked = {
            "model": openai.models.list().data[0].id,
            "messages": [{"role": "user", "content": "My dog is called Rex. Where is my dog?"}],
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "extra_headers": {**session, "idempotency-key": "first"},
        }
        choice = openai.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls or []
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert (call.function.name, json.loads(call.function.arguments)["name"] in names["enum"]) == (
            "find_dog",
            True,
        )
        with openai.chat.completions.stream(**asked) as stream:
            again = stream.get_final_completion().choices[0].message.tool_calls
        assert again is not None
        assert [(each.id, each.function.arguments) for each in again] == [(call.id, call.function.arguments)]
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rex is in the park."}
        later = {**asked, "messages": [result], "tool_choice": "auto", "extra_headers": session}
        assert openai.chat.completions.create(**later).choices[0].message.content
        assert cluster.sessions()["tools"]["turns"] == 2
        other = {"type": "function", "function": {"name": "another"}}
        with pytest.raises(BadRequestError, match="began with others"):
            openai.chat.completions.create(**later | {"tools": [other]})
    with cluster.client() as client:
        assert client.delete("/v1/kedge/sessions/tools").status_code == 204


def test_metrics_page(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    session.close()
    assert cluster.metric("kedge_kv_pages", account="leaked") == 0
    assert cluster.metric("kedge_kv_pool_pages") == cluster.pages()["total"]
    assert cluster.metric("kedge_turns_total", outcome="committed") > 0
    assert cluster.metric("kedge_ttft_seconds_count") > 0
    assert cluster.metric("kedge_inter_token_seconds_count") > 0
    assert cluster.metric("kedge_controller_replicas_live") == 2
