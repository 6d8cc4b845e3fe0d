"""Clients of a served load, in processes of their own: one process cannot read as many events as a card makes.

Each process has a part of the streams. A stream is one conversation over /v1/completions with token ids, greedy; every
turn is a connection of its own, because a server may close one that is idle between turns.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import aiohttp

from serving.cli.client.stream import EventSplitter, error_message, parse_event
from serving.cli.load.dialogue import Dialogue
from serving.cli.load.prompts import PromptSource
from serving.cli.load.settings import Endpoint, LoadSettings, Mode, PromptKind
from serving.cli.load.turn import TurnRequest

READY_S = 60.0
END_S = 10.0
GRACE_S = 15.0
"""For a process to hand over what it heard, beyond the time limit of its turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What each stream sends and asks for, in tokens. Without `session` it is a call by itself. `number` counts from 1
    and chooses the prompt."""

    number: int
    prompt_tokens: int
    new_tokens: int
    session: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes. Token ids of prompts are below `vocab_size`."""

    url: str
    model: str
    vocab_size: int
    seed: int = 1


@dataclass(slots=True)
class Heard:
    """One turn of one stream, on time.perf_counter's clock, which all processes of a machine share. One time for each
    token; tokens of the same event have the same."""

    stream: int
    asked_s: float
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class ClientProcesses:
    """`streams` streams over `processes` processes. To be closed."""

    def __init__(self, target: Target, streams: int, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], list[Connection]()
        for index in range(processes):
            ours, theirs = spawn.Pipe()
            part = list(range(index, streams, processes))
            process = spawn.Process(target=serve_commands, args=(theirs, target, part), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def wait_ready(self) -> None:
        """Raises TimeoutError, or EOFError if a process ended."""
        for pipe in self._pipes:
            _receive(pipe, READY_S)

    def run(self, turn: Turn, limit_s: float) -> list[Heard]:
        """Lets all streams send their turn at once. What has not ended after `limit_s` becomes an error. Raises
        TimeoutError or EOFError if a process does not answer."""
        for pipe in self._pipes:
            pipe.send((turn, limit_s))
        end_s = time.monotonic() + limit_s + GRACE_S
        parts = [_receive(pipe, end_s - time.monotonic()) for pipe in self._pipes]
        return [heard for part in parts for heard in part]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, limit_s: float) -> list[Heard]:
    if not pipe.poll(max(0.0, limit_s)):
        raise TimeoutError("a client process does not answer")
    heard: list[Heard] = pipe.recv()
    return heard


def serve_commands(pipe: Connection, target: Target, streams: Sequence[int]) -> None:
    """Runs in a client process until the pipe is closed."""
    run_id = uuid.uuid4().hex[:8]
    names = {stream: f"served-{run_id}-{stream}" for stream in streams}
    pipe.send([])
    while True:
        try:
            turn, limit_s = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        requests = [request_of(target, stream, name, turn) for stream, name in names.items()]
        gc.collect()
        gc.disable()  # a pause of the client would look like a pause of the server
        heard = asyncio.run(ask_all(requests, limit_s))
        gc.enable()
        pipe.send(heard)


def request_of(target: Target, stream: int, name: str, turn: Turn) -> TurnRequest:
    """The turn as `kedge bench` would send it. A turn without a session has a prompt that no other turn has."""
    settings = LoadSettings(
        url=target.url,
        model=target.model,
        mode=Mode.SESSION if turn.session else Mode.RESEND,
        endpoint=Endpoint.COMPLETIONS,
        prompt=PromptKind.IDS,
        sessions=1,
        turns=turn.number,
        input_tokens=turn.prompt_tokens,
        output_tokens=turn.new_tokens,
        concurrency=1,
        warmup=0,
        seed=target.seed,
        vocab_size=target.vocab_size,
        ignore_eos=True,
        timeout_s=0.0,
    )
    prompts = PromptSource(target.seed, target.vocab_size)
    number = stream if turn.session else -1 - stream
    return Dialogue(settings, prompts, number, name, 0).request(turn.number)


async def ask_all(requests: Sequence[TurnRequest], limit_s: float) -> list[Heard]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=limit_s)
    headers = {"accept-encoding": "identity"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as client:
        return list(await asyncio.gather(*(ask(client, request) for request in requests)))


async def ask(client: aiohttp.ClientSession, request: TurnRequest) -> Heard:
    """Streams a turn to its end. Events are parsed only then, so that parsing delays no other stream's times."""
    arrivals: list[tuple[float, bytes]] = []
    heard = Heard(abs(request.session), time.perf_counter())
    try:
        async with client.post(request.url, json=request.body, headers=request.headers) as response:
            async for data in response.content.iter_any():
                arrivals.append((time.perf_counter(), data))  # noqa: PERF401  (kept when the stream breaks)
        if not response.ok:
            body = b"".join(data for _, data in arrivals).decode(errors="replace")
            heard.error = f"HTTP {response.status}: {error_message(body)[:200]}"
        else:
            read_events(arrivals, heard)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


def read_events(arrivals: Sequence[tuple[float, bytes]], heard: Heard) -> None:
    """Adds the stream's events to `heard`. Raises ValueError if one cannot be read."""
    splitter, ended = EventSplitter(), False
    for at_s, data in arrivals:
        for payload in splitter.push(data):
            chunk = parse_event(payload)
            if chunk is None:
                continue
            heard.times_s += [at_s] * len(chunk.token_ids)
            heard.error = heard.error or chunk.error
            ended = ended or chunk.finish_reason is not None
            if chunk.usage is not None:
                heard.prompt_tokens = chunk.usage.prompt_tokens
                heard.cached_tokens = chunk.usage.cached_tokens or 0
    if heard.error is None and not (ended and heard.times_s):
        heard.error = "the stream ended before the turn did"
