"""`execution.deterministic` through HTTP and real replicas: a session's log-probabilities are those of a quiet replica
that computes the whole history at once, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens

BUSY = 6
"""Sessions beside the one that is looked at."""


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    def deterministic(document: dict[str, Any]) -> None:
        document["applications"][0]["args"]["execution"] = {"deterministic": True}

    shared_cluster.use(deterministic)
    return shared_cluster


class Sampled:
    """A session whose tokens are sampled with a seed, and the log-probability of each."""

    def __init__(
        self, client: httpx.Client, seed: int, history: tuple[int, ...] = (), name: str = ""
    ) -> None:
        self._client = client
        self._seed = seed
        self.tokens = list(history)
        self.chosen: dict[int, float] = {}
        self.answer_at = 0
        self.session_id = name or Conversation.open(client).session_id

    def turn(self, new: list[int], count: int) -> None:
        output, scored = self._sample(new, count, session_params={"id": self.session_id})
        self.tokens += new
        self.answer_at = len(self.tokens)
        assert [token for _, token, _ in scored] == output
        self.chosen |= {at: entry[0] for at, entry in enumerate(scored, len(self.tokens))}
        self.tokens += output

    def fork(self, seed: int) -> Sampled:
        reply = self._client.post(f"/v1/kedge/sessions/{self.session_id}/fork", json={})
        assert reply.status_code == 200, reply.text
        return Sampled(self._client, seed, tuple(self.tokens), reply.json()["session_id"])

    def check(self) -> None:
        """By one request with the whole history, whose every token is scored, and one that gives the last answer
        again."""
        asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        reply = self._client.post("/generate", json={"input_ids": self.tokens, **asked})
        assert reply.status_code == 200, reply.text
        scored = reply.json()["meta_info"]["input_token_logprobs"]
        assert self.chosen
        assert {at: scored[at][0] for at in self.chosen} == self.chosen
        before, answer = self.tokens[: self.answer_at], self.tokens[self.answer_at :]
        assert self._sample(before, len(answer))[0] == answer

    def _sample(self, tokens: list[int], count: int, **fields: Any) -> tuple[list[int], list[Any]]:
        """The tokens that are picked, and their log-probabilities as the API has them."""
        sampling = {
            "max_new_tokens": count,
            "temperature": 1,
            "sampling_seed": self._seed,
            "ignore_eos": True,
        }
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **fields}
        reply = self._client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["output_ids"], reply.json()["meta_info"]["output_token_logprobs"]


def talk(cluster: ServedCluster, seed: int, goes_on: Callable[[], bool]) -> None:
    """Sessions of some thirty turns, one after another, for as long as `goes_on`; at least one."""
    rng = random.Random(seed)
    with cluster.client() as client:
        while True:
            session = Sampled(client, seed)
            while len(session.tokens) < 800:
                session.turn(random_tokens(rng, rng.randrange(1, 40)), rng.randrange(1, 12))
            session.check()
            if not goes_on():
                return


def test_a_fork_and_a_takeover_under_load_change_no_bit(cluster: ServedCluster, client: httpx.Client) -> None:
    rng, others = random.Random(31), list[Future[None]]()
    done = False
    with ThreadPoolExecutor(BUSY) as pool:
        try:
            others += [pool.submit(talk, cluster, 100 + n, lambda: not done) for n in range(BUSY)]
            session = Sampled(client, 7)
            for _ in range(3):
                session.turn(random_tokens(rng, 90), 12)
            child = session.fork(8)
            child.turn(random_tokens(rng, 30), 8)
            owner = cluster.sessions()[session.session_id]["replica_id"]
            cluster.kill(cluster.replicas()[owner]["pid"])
            for each in (session, child):
                each.turn(random_tokens(rng, 20), 12)
                assert cluster.sessions()[each.session_id]["replica_id"] != owner
        finally:
            done = True
        for other in others:
            other.result(timeout=60)
    session.check()
    child.check()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
