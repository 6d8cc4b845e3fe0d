"""Clients that talk while a cluster is changed. Each turn is checked, and none may fail."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from session_client import Conversation, random_tokens

Connect = Callable[[], httpx.Client]

NUM_CLIENTS = 6
AROUND_S = 1.5
"""How long the clients talk before and after a change."""


@dataclass
class Talk:
    """What the clients saw: in `turns` when each turn ended, in `waits_s` how long it waited for its first token, in
    `stalls_s` its longest time without a token."""

    failures: list[BaseException] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, connect: Connect, seed: int) -> None:
        """One client: streamed turns of one session. Each turn is checked against what the client heard before."""
        rng = random.Random(seed)
        try:
            with connect() as client:
                session = Conversation.open(client)
                while not self.over.is_set():
                    self._turn(session, rng)
                session.close()
        except BaseException as error:
            self.failures.append(error)

    def _turn(self, session: Conversation, rng: random.Random) -> None:
        began_s, heard_s = time.monotonic(), list[float]()
        session.told_turn(random_tokens(rng, 5), 40, lambda _: heard_s.append(time.monotonic()))
        self.waits_s.append(heard_s[0] - began_s)
        self.stalls_s.append(max(after - before for before, after in pairwise([began_s, *heard_s])))
        self.turns.append(time.monotonic())
        if len(session.history) > 2000:
            session.close()
            session.session_id, session.history = Conversation.open(session.client).session_id, []

    def report(self) -> str:
        gaps_s = [after - before for before, after in pairwise(self.turns)]
        waits_s = sorted(self.waits_s)
        late = sum(wait_s > 1.0 for wait_s in waits_s)
        return (
            f"{len(self.turns)} turns, first token at worst after {waits_s[-1]:.2f} s, {late} over 1 s,"
            f" no turn ended for {max(gaps_s):.2f} s at most"
        )


def talk_through(connect: Connect, change: Callable[[], Any], num_clients: int = NUM_CLIENTS) -> Talk:
    """Clients, each with a connection of its own, talk before, during and after the call of `change`."""
    talk = Talk()
    clients = [
        threading.Thread(target=talk.run, args=(connect, seed), daemon=True) for seed in range(num_clients)
    ]
    for each in clients:
        each.start()
    time.sleep(AROUND_S)
    try:
        change()
        time.sleep(AROUND_S)
    finally:
        talk.over.set()
        for each in clients:
            each.join(120.0)
    assert not any(each.is_alive() for each in clients), "a turn hangs"
    assert not talk.failures, talk.failures
    logging.getLogger(__name__).info("%s", talk.report())
    return talk
