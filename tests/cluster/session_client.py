"""The session protocol as the tests use it, with token ids, and the checks of every turn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

VOCAB_FROM, VOCAB_TO = 300, 900
"""Token ids that are plain text in the embedded model's vocabulary."""

Heard = Callable[[int], None]


@dataclass
class Conversation:
    """One session and the token history that the client believes it has. Its turns have this `adapter`."""

    client: httpx.Client
    session_id: str
    history: list[int] = field(default_factory=list)
    adapter: str | None = None

    @classmethod
    def open(cls, client: httpx.Client, session_id: str | None = None, **fields: Any) -> Conversation:
        body = {"capacity_of_str_len": 100_000, "streaming": True, "session_id": session_id, **fields}
        reply = client.post("/open_session", json={k: v for k, v in body.items() if v is not None})
        assert reply.status_code == 200, reply.text
        return cls(client, reply.json())

    def exact_turn(self, new: list[int], *, resumed: bool = False) -> None:
        """A turn whose answer must equal that of one fresh request with the whole history."""
        expected = self.history + new
        self.turn(new, resumed=resumed)
        assert self.history == expected + generate_once(self.client, expected, 8, self.adapter)

    def turn(self, new: list[int], max_new_tokens: int = 8, *, resumed: bool = False) -> dict[str, Any]:
        """A greedy turn. Checks the counts. `resumed`: the KV may have been lost since the last turn."""
        meta, output = self._generate(new, max_new_tokens)
        length = len(self.history)
        assert meta["prompt_tokens"] == length + len(new)
        assert meta["completion_tokens"] == len(output)
        if not resumed:
            assert meta["cached_tokens"] in ((length, length - 1) if length else (0,)), (meta, length)
        self.history += new + output
        return meta

    def told_turn(self, new: list[int], max_new_tokens: int, heard: Heard) -> list[int]:
        """A greedy turn that is streamed. Calls `heard` with the number of each event. Each event must have the whole
        answer so far and continue the one before. Returns the answer's tokens."""
        tokens: list[int] = []
        body = self._body(new, max_new_tokens) | {"stream": True}
        with self.client.stream("POST", "/generate", json=body) as reply:
            for number, event in enumerate(events_of(reply)):
                assert event["output_ids"][: len(tokens)] == tokens
                tokens, meta = event["output_ids"], event["meta_info"]
                assert meta["completion_tokens"] == len(tokens)
                assert meta["prompt_tokens"] == len(self.history) + len(new)
                heard(number)
        assert meta["finish_reason"]["type"] == "length"
        self.history += new + tokens
        return tokens

    def close(self) -> None:
        assert self.client.post("/close_session", json={"session_id": self.session_id}).status_code == 200

    def _generate(self, new: list[int], max_new_tokens: int) -> tuple[dict[str, Any], list[int]]:
        reply = self.client.post("/generate", json=self._body(new, max_new_tokens))
        assert reply.status_code == 200, reply.text
        return reply.json()["meta_info"], reply.json()["output_ids"]

    def _body(self, new: list[int], max_new_tokens: int) -> dict[str, Any]:
        return {
            "input_ids": new,
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": self.session_id},
            "lora_path": self.adapter,
        }


def events_of(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream until it is done, without comments. An error fails the test."""
    assert reply.status_code == 200, reply.read()
    for line in reply.iter_lines():
        if not line or line.startswith(":"):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        yield event
    raise AssertionError("the stream broke off")


def generate_once(
    client: httpx.Client, tokens: list[int], max_new_tokens: int, adapter: str | None = None
) -> list[int]:
    """One greedy request without a session: the reference."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
        "lora_path": adapter,
    }
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    output: list[int] = reply.json()["output_ids"]
    return output


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_FROM, VOCAB_TO) for _ in range(count)]
