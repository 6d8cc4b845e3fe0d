"""The session protocol as a test speaks it, with token ids, and what it expects of every turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

VOCAB_FROM, VOCAB_TO = 300, 900
"""Token ids that are plain text in the embedded model's vocabulary."""


@dataclass
class Conversation:
    """One session and the token history that the client believes it has."""

    client: httpx.Client
    session_id: str
    history: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, client: httpx.Client, session_id: str | None = None, **fields: Any) -> Conversation:
        body = {"capacity_of_str_len": 100_000, "session_id": session_id, **fields}
        reply = client.post("/open_session", json={k: v for k, v in body.items() if v is not None})
        assert reply.status_code == 200, reply.text
        return cls(client, reply.json())

    def exact_turn(self, new: list[int], *, resumed: bool = False) -> None:
        """A turn that must say what one fresh request with the whole history says."""
        expected = self.history + new
        self.turn(new, resumed=resumed)
        assert self.history == expected + generate_once(self.client, expected, 8)

    def turn_cut_off(self, kill: Callable[[], None]) -> list[str]:
        """The lines of a long streamed turn in which `kill` is called after a few."""
        body = {
            "input_ids": [403],
            "stream": True,
            "sampling_params": {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": self.session_id},
        }
        lines: list[str] = []
        with self.client.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200
            for line in filter(None, reply.iter_lines()):
                lines.append(line)
                if len(lines) == 3:
                    kill()
        return lines

    def turn(self, new: list[int], max_new_tokens: int = 8, *, resumed: bool = False) -> dict[str, Any]:
        """A greedy turn; checks the counts. `resumed`: the KV may have been lost since the last turn."""
        meta, output = self._generate(new, max_new_tokens)
        length = len(self.history)
        assert meta["prompt_tokens"] == length + len(new)
        assert meta["completion_tokens"] == len(output)
        if not resumed:
            assert meta["cached_tokens"] in ((length, length - 1) if length else (0,)), (meta, length)
        self.history += new + output
        return meta

    def close(self) -> None:
        assert self.client.post("/close_session", json={"session_id": self.session_id}).status_code == 200

    def _generate(self, new: list[int], max_new_tokens: int) -> tuple[dict[str, Any], list[int]]:
        body = {
            "input_ids": new,
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": self.session_id},
        }
        reply = self.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["meta_info"], reply.json()["output_ids"]


def generate_once(client: httpx.Client, tokens: list[int], max_new_tokens: int) -> list[int]:
    """One greedy request without a session: the reference."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
    }
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    output: list[int] = reply.json()["output_ids"]
    return output


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_FROM, VOCAB_TO) for _ in range(count)]
