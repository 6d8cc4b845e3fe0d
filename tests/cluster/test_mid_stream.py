"""Turns of a killed replica go on elsewhere in mid-stream. Each client gets one whole answer, each session one turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from neighbours import neighbours
from served_cluster import ServedCluster, eventually
from session_client import Conversation, Heard, events_of, generate_once

LENGTH = 800
STORY = 2400
LONG = 5000
"""Such an answer is not at its end when a busy machine has seen its takeover."""
NEW = [404, 405, 406]


def said(text: str) -> dict[str, Any]:
    return {"model": "kedge-chat", "messages": [{"role": "user", "content": text}], "temperature": 0}


def chatted(client: httpx.Client, session_id: str, text: str) -> str:
    reply = client.post("/v1/chat/completions", json=said(text), headers={"x-session-id": session_id})
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


def story(client: httpx.Client, session_id: str, heard: Heard = lambda _: None) -> str:
    """The text of a long streamed answer. Calls `heard` with the number of each chunk."""
    body = said("Tell me a story.") | {"max_tokens": STORY, "ignore_eos": True, "stream": True}
    pieces = []
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-session-id": session_id}
    ) as reply:
        for number, event in enumerate(events_of(reply)):
            pieces.append(event["choices"][0]["delta"]["content"])
            heard(number)
    assert event["choices"][0]["finish_reason"] == "length"
    return "".join(pieces)


def told_at_once(client: httpx.Client, **headers: str) -> httpx.Response:
    """A long answer with log-probabilities, not streamed."""
    body = {
        "model": "kedge-chat",
        "prompt": NEW,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    return client.post("/v1/completions", json=body, headers=headers)


def test_every_turn_of_a_killed_replica_goes_on(cluster: ServedCluster, client: httpx.Client) -> None:
    calm = Conversation.open(client)
    owner, (streamed, chatting, whole) = neighbours(cluster, client, 3)
    for session in (calm, chatting):
        chatted(client, session.session_id, "My dog is called Rex.")
    undisturbed = story(client, calm.session_id)
    for session in (streamed, whole):
        session.turn([400, 401, 402])
    answer = generate_once(client, [*streamed.history, *NEW], LONG)
    alone = generate_once(client, NEW, LENGTH)
    before, pid = cluster.sessions(), cluster.replicas()[owner]["pid"]
    takeovers = cluster.metric("kedge_takeovers_total")
    begun = threading.Event()
    headers = {"x-session-id": whole.session_id, "idempotency-key": "once"}
    with ThreadPoolExecutor(4) as pool:
        collected = pool.submit(told_at_once, client, **headers)
        without_session = pool.submit(told_at_once, client)
        eventually(lambda: collected.done() or cluster.replicas()[owner]["live_turns"], interval_s=0.01)
        generated = pool.submit(streamed.told_turn, NEW, LONG, lambda _: begun.set())
        assert begun.wait(60)
        assert story(client, chatting.session_id, lambda n: None if n else cluster.kill(pid)) == undisturbed
        assert generated.result() == answer
        for reply, tokens in ((collected.result(), answer[:LENGTH]), (without_session.result(), alone)):
            assert "idempotent-replayed" not in reply.headers
            (choice,) = reply.json()["choices"]
            assert choice["token_ids"] == tokens
            assert len(choice["logprobs"]["token_logprobs"]) == LENGTH
            assert reply.json()["usage"]["completion_tokens"] == LENGTH

    # The two streams. For the turns that are not streamed, nobody knows how far they were.
    assert cluster.metric("kedge_takeovers_total") >= takeovers + 2
    after = cluster.sessions()
    for session in (streamed, chatting, whole):
        old, new = before[session.session_id], after[session.session_id]
        assert new["turns"] == old["turns"] + 1
        if (
            session is not whole or new["epoch"] != old["epoch"]
        ):  # this turn began first and may have ended before the kill
            assert new["epoch"] == old["epoch"] + 1
            assert new["replica_id"] != owner
    assert after[streamed.session_id]["tokens"] == len(streamed.history)
    again = told_at_once(client, **headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["choices"] == collected.result().json()["choices"]
    settle(streamed)
    question = "What is my dog called?"
    remembered = chatted(client, calm.session_id, question)
    assert "Rex" in remembered
    assert chatted(client, chatting.session_id, question) == remembered
    assert client.get("/v1/kedge/audit").json()["clean"]
    for session in (calm, streamed, chatting, whole):
        session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    assert cluster.pages()["leaked"] == 0


def test_a_turn_goes_on_though_its_next_replica_is_killed_too(
    cluster: ServedCluster, client: httpx.Client
) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    answer = generate_once(client, [*session.history, *NEW], LONG)
    pids = {name: replica["pid"] for name, replica in cluster.replicas().items()}
    first = cluster.sessions()[session.session_id]

    def kill_two(number: int) -> None:
        if number == 0:
            cluster.kill(pids.pop(first["replica_id"]))
            second = eventually(lambda: owned_anew(cluster, session, first["epoch"]), interval_s=0.01)
            cluster.kill(pids.pop(second["replica_id"]))

    assert session.told_turn(NEW, LONG, kill_two) == answer
    last = cluster.sessions()[session.session_id]
    assert (last["epoch"], last["turns"]) == (first["epoch"] + 2, first["turns"] + 1)
    settle(session)
    session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    assert client.get("/v1/kedge/audit").json()["clean"]


def settle(session: Conversation) -> None:
    """The session's next turns are right and find its KV. On a busy machine the turn may have been committed before its
    replica was killed. Then the replica that answered from the log has no KV yet."""
    session.exact_turn([410, 411], resumed=True)
    session.turn([412])


def owned_anew(cluster: ServedCluster, session: Conversation, epoch: int) -> dict[str, Any] | None:
    entry = cluster.sessions()[session.session_id]
    return entry if entry["epoch"] > epoch else None
