"""A replica of two ranks on a real cluster answers as one rank does, and is replaced as a whole."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation, random_tokens

from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.build import build_engine
from engine.settings import CacheSettings, EngineSettings, ModelSettings

MODEL = ROOT / "assets" / "models" / "kedge-chat"
RANKS = "ray::RankActor"
LENGTH = 400


def two_ranks(document: dict[str, Any]) -> None:
    (application,) = document["applications"]
    application["args"]["execution"] = {"tensor_parallel": 2}
    application["args"]["replicas"] |= {"count": 1, "num_cpus": 0.4}
    # No other replica can take over. A turn waits until the replica has been replaced.
    application["args"]["ingress"] |= {"failover_timeout_s": 120}


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(two_ranks)
    return shared_cluster


def alone(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of an engine in this process, as the reference."""
    told: list[TokenDelta] = []
    model = ModelSettings(str(MODEL), device="cpu", num_threads=1)
    engine = build_engine(EngineSettings(model, CacheSettings(16, 64)), told.extend)
    engine.start()
    params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(str(index), prompt, sampling=params))
    eventually(lambda: sum(delta.finish is not None for delta in told) == len(prompts))
    engine.stop(10.0)
    return [
        [token for delta in told if delta.request_id == str(index) for token in delta.token_ids]
        for index in range(len(prompts))
    ]


def test_two_ranks_answer_as_one(cluster: ServedCluster) -> None:
    (replica,) = cluster.replicas().values()
    assert replica["execution"]["tensor_parallel"] == 2
    assert len(cluster.pids(RANKS)) == 1
    rng = random.Random(4)
    prompts = [random_tokens(rng, 30) for _ in range(3)]
    with cluster.client() as client:
        sessions = [Conversation.open(client) for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.turn(prompt[:20], 4)
            session.turn(prompt[20:], 8)
        asked = [session.history[:-8] for session in sessions]
        assert [session.history[-8:] for session in sessions] == alone(asked, 8)
        body = {"messages": [{"role": "user", "content": "My name is Ada. Say hello."}], "max_tokens": 12}
        reply = client.post("/v1/chat/completions", json={"model": "kedge-chat", "temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]


def test_a_lost_rank_takes_its_replica_along_and_its_turn_goes_on(cluster: ServedCluster) -> None:
    """The turn goes on at the replica that replaces the lost one."""
    rng = random.Random(5)
    (before,) = cluster.replicas()
    (rank,) = cluster.pids(RANKS)
    with cluster.client() as client:
        session = Conversation.open(client)
        session.turn(random_tokens(rng, 20), 6)
        new = random_tokens(rng, 10)
        expected = session.history + new
        session.told_turn(new, LENGTH, lambda number: cluster.kill(rank) if number == 0 else None)
        assert session.history == expected + alone([expected], LENGTH)[0]
        (after,) = eventually(cluster.replicas)
        assert after != before
        (other_rank,) = cluster.pids(RANKS)
        assert other_rank != rank
        session.turn(random_tokens(rng, 3))
    assert cluster.pages()["leaked"] == 0


def test_no_rank_outlives_its_replica(cluster: ServedCluster) -> None:
    (replica,) = cluster.replicas().values()
    (rank,) = cluster.pids(RANKS)
    cluster.kill(replica["pid"])
    eventually(lambda: rank not in cluster.pids(RANKS), 10.0)
    eventually(lambda: _one_replica(cluster), 60.0, 0.5)
    assert len(cluster.pids(RANKS)) == 1


def _one_replica(cluster: ServedCluster) -> bool:
    try:
        return len(cluster.replicas()) == 1
    except (httpx.HTTPError, ValueError, KeyError):
        return False
