"""The cluster that a real Prometheus watches, with clients whose turns may fail."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from served_cluster import ServedCluster
from session_client import random_tokens

FAULTS = "/v1/kedge/debug/faults"
NUM_PAGES = 300


def watched(document: dict[str, Any]) -> None:
    """Faults may be planted."""
    application = document["applications"][0]
    application["import_path"] = "null_app:build"
    args = application["args"]
    args["debug"] = {"faults": True}
    args["metrics"] = {"cluster_name": "tested", "audit_interval_s": 2.0}
    args["cache"].update(num_pages=NUM_PAGES, host_mib=0)
    args["cache"].pop("size_mib", None)


Work = Callable[[httpx.Client, random.Random], int]
"""One call or several. Returns the status of the last one."""


def stream(client: httpx.Client, tokens: list[int], num_new: int, session_id: str | None = None) -> int:
    """A greedy turn, streamed. Returns 0 if the stream breaks off."""
    sampling = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    if session_id is not None:
        body["session_params"] = {"id": session_id}
    with client.stream("POST", "/generate", json=body) as reply:
        whole = reply.read()
    return reply.status_code if reply.status_code != 200 or b"[DONE]" in whole else 0


def short_stream(client: httpx.Client, rng: random.Random) -> int:
    return stream(client, random_tokens(rng, 5), 4)


def session_of_two_turns(client: httpx.Client, rng: random.Random) -> int:
    opened = client.post("/open_session", json={"capacity_of_str_len": 100_000})
    if opened.status_code != 200:
        return opened.status_code
    session_id = opened.json()
    for _ in range(2):
        status = stream(client, random_tokens(rng, 5), 20, session_id)
    client.post("/close_session", json={"session_id": session_id})
    return status


@contextmanager
def clients(cluster: ServedCluster, count: int, work: Work, pause_s: float = 0.0) -> Iterator[Counter[int]]:
    """Clients, `count` of them, do `work` over and over. Yields the counts of the statuses they get."""
    over, statuses = threading.Event(), Counter[int]()

    def run(seed: int) -> None:
        rng = random.Random(seed)
        with cluster.client() as client:
            while not over.is_set():
                try:
                    statuses[work(client, rng)] += 1
                except httpx.HTTPError:
                    statuses[0] += 1
                over.wait(pause_s)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join(60.0)
        assert not any(thread.is_alive() for thread in threads), "a call hangs"
