"""OpenAI's own client repeats a call when its connection breaks. A turn that was committed must not run twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.front.http import create_http_app
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.local_service import MODEL, http_server

CONTINUE = {"role": "user", "content": "Continue."}
SESSION = "talk"


@dataclass
class Cutter:
    """A proxy that breaks connections. It breaks the next `questions` as soon as the question is at the server. It
    breaks the next `answers` once it has the whole answer, before it passes on a byte of it."""

    port: int
    answers: int = 0
    questions: int = 0
    retries: list[str] = field(default_factory=list)
    """The SDK's retry count of each call."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one call for each connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields["content-length"]))
        self.retries.append(fields["x-stainless-retry-count"])
        upstream, out = await asyncio.open_connection("127.0.0.1", self.port)
        head = head.replace(b"Connection: keep-alive", b"Connection: close")
        out.write(head + body)
        await out.drain()
        if self.questions:
            self.questions -= 1
            out.close()
        else:
            answer = await upstream.read()
            out.close()
            if self.answers:
                self.answers -= 1
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()


@dataclass
class Scene:
    failover: Failover
    cutter: Cutter
    client: openai.AsyncOpenAI

    async def say(self, message: dict[str, str], **headers: str) -> tuple[dict[str, str], Any]:
        """Runs one turn of the session. Returns the headers and the token ids of the answer."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=MODEL.model_id,
            messages=[message],  # type: ignore[list-item]
            max_tokens=6,
            extra_headers={"x-session-id": SESSION, "x-session-mode": "append", **headers},
            extra_body={"return_token_ids": True},
        )
        return dict(raw.headers), raw.parse().choices[0].token_ids

    def num_turns(self) -> int:
        turns, _ = self.failover.committed(SESSION)
        return turns


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with running_failover(tmp_path) as failover:
        failover.open_session(SESSION)
        async with http_server(create_http_app(failover.service)) as url:
            cutter = Cutter(int(url.rpartition(":")[2]))
            server = await asyncio.start_server(cutter.serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            base_url = f"http://127.0.0.1:{port}/v1"
            async with server, openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=2) as client:
                yield Scene(failover, cutter, client)


async def test_a_turn_whose_answer_was_cut_off_runs_once(scene: Scene) -> None:
    """The answer is sampled, so a second run would say something else."""
    scene.cutter.answers = 1
    headers, tokens = await scene.say(CONTINUE)
    assert scene.cutter.retries == ["0", "1"]
    assert scene.num_turns() == 1
    assert headers["idempotent-replayed"] == "true"
    assert headers["x-session-turn"] == "0"
    assert len(tokens) == 6


async def test_so_does_one_that_is_cut_off_twice(scene: Scene) -> None:
    await scene.say({"role": "user", "content": "Hello."})
    scene.cutter.answers = 2
    headers, _ = await scene.say(CONTINUE)
    assert scene.cutter.retries == ["0", "0", "1", "2"]
    assert scene.num_turns() == 2
    assert headers["x-session-turn"] == "1"


async def test_the_same_message_sent_again_is_a_turn_of_its_own(scene: Scene) -> None:
    for number in range(3):
        headers, _ = await scene.say(CONTINUE)
        assert headers["x-session-turn"] == str(number)
        assert "idempotent-replayed" not in headers
    assert scene.num_turns() == 3


async def test_a_message_that_came_to_nothing_is_not_taken_for_an_equal_one_before(scene: Scene) -> None:
    """The first try is cut off while it runs, so it leaves no trace. The second try runs."""
    await scene.say(CONTINUE)
    rig = scene.failover.rigs[0]
    rig.runner.hold()
    scene.cutter.questions = 1
    again = asyncio.create_task(scene.say(CONTINUE))
    await rig.begun()
    (first_try,) = rig.turns._live.values()
    to_client = first_try.emit
    async with asyncio.timeout(20):
        while first_try.emit is to_client:  # until the replica knows that its client has left
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # the abort is on its way to the engine, whose step is held
    rig.runner.go_on()
    headers, _ = await again
    assert scene.cutter.retries == ["0", "0", "1"]
    assert headers["x-session-turn"] == "1"
    assert "idempotent-replayed" not in headers
    assert scene.num_turns() == 2


async def test_a_replica_that_took_the_session_over_knows_the_turn(scene: Scene) -> None:
    """The answer is cut off, then its replica is lost. The retry is answered from the log."""
    scene.cutter.answers = 1
    wait = asyncio.create_task(scene.say(CONTINUE))
    async with asyncio.timeout(20):
        while scene.cutter.answers:
            await asyncio.sleep(0.001)
    scene.failover.replicas.dead.add("a")
    headers, _ = await wait
    assert scene.cutter.retries == ["0", "1"]
    assert headers["idempotent-replayed"] == "true"
    assert scene.num_turns() == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_that_was_cut_off_in_the_session_runs_once(scene: Scene, streams: bool) -> None:
    scene.cutter.answers = 1
    raw = await scene.client.responses.with_raw_response.create(
        model=MODEL.model_id,
        input="Continue.",
        max_output_tokens=16,
        stream=streams,
        extra_headers={"x-session-id": SESSION},
    )
    assert scene.cutter.retries == ["0", "1"]
    assert (raw.headers["idempotent-replayed"], raw.headers["x-session-turn"]) == ("true", "0")
    assert scene.num_turns() == 1


async def test_a_key_of_the_clients_own_counts_alone(scene: Scene) -> None:
    await scene.say(CONTINUE, **{"idempotency-key": "mine"})
    headers, _ = await scene.say(CONTINUE, **{"idempotency-key": "mine"})
    assert headers["idempotent-replayed"] == "true"
    scene.cutter.answers = 1
    headers, _ = await scene.say(CONTINUE, **{"idempotency-key": "another"})
    assert (headers["x-session-turn"], scene.num_turns()) == ("1", 2)


async def test_a_count_that_is_none_is_refused_by_name(scene: Scene) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await scene.say(CONTINUE, **{"x-stainless-retry-count": "often"})
    assert caught.value.param == "x-stainless-retry-count"
