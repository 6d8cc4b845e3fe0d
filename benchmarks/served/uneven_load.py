"""Busy sessions that share one replica of two: turns and tokens, with sessions allowed to move away and without.

Start two servers beforehand, one with `rebalancing: {enabled: false}` (own port, controller.name, state_dir and Ray):

    chrt -f 50 python -m benchmarks.served.uneven_load --server moves=http://127.0.0.1:8000 \\
        --server stays=http://127.0.0.1:8001 --rounds 3 --json uneven.json

Each round loads one server after the other (A B A B). It opens sessions until enough of them are on one replica, and
runs only these, each with a turn at all times. A sample of the answers is asked for again as one request with the whole
history.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from serving.cli.load.machine import CpuMeter, describe_machine
from serving.cli.load.server_processes import find_server_pids

TOKENS = range(300, 900)
CHECKED_TURNS = 4
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """`history` tokens exist before; a turn is `new` tokens in and `output` out."""

    sessions: int
    history: int
    new: int
    output: int
    seconds: float


@dataclass(slots=True)
class Round:
    """The result of one round of one server. Times are of turns that ended in its second half, when moves are over."""

    server: str
    tokens_per_s: float = 0.0
    late_tokens_per_s: float = 0.0
    late_median_s: float = 0.0
    late_p95_s: float = 0.0
    longest_s: float = 0.0
    moves: int = 0
    sessions_at_end: list[int] = field(default_factory=list)
    computed_again_tokens: int = 0
    checked: int = 0
    wrong: int = 0
    other_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: list[int]
    output: list[int]
    cached: int
    num_new: int
    begun_s: float
    ended_s: float


class Talker:
    """One session."""

    def __init__(self, client: httpx.AsyncClient, seed: str) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self.session_id = ""
        self.history: list[int] = []
        self.turns: list[Turn] = []

    async def open(self) -> None:
        reply = await self._client.post(
            "/open_session", json={"capacity_of_str_len": 1_000_000, "streaming": True}
        )
        self.session_id = reply.raise_for_status().json()

    async def turn(self, num_new: int, num_output: int) -> None:
        new = self._rng.choices(TOKENS, k=num_new)
        begun_s = time.perf_counter()
        answer = await generate(self._client, new, num_output, self.session_id)
        prompt = self.history + new
        self.history = prompt + answer["output_ids"]
        cached = answer["meta_info"]["cached_tokens"]
        self.turns.append(Turn(prompt, answer["output_ids"], cached, num_new, begun_s, time.perf_counter()))

    async def talk(self, load: Load, until_s: float) -> None:
        while time.perf_counter() < until_s:
            await self.turn(load.new, load.output)

    async def close(self) -> None:
        await self._client.post("/close_session", json={"session_id": self.session_id})


async def generate(
    client: httpx.AsyncClient, tokens: list[int], num_output: int, session_id: str | None = None
) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_output, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
    if session_id is not None:
        body["session_params"] = {"id": session_id}
    reply = await client.post("/generate", json=body)
    return dict(reply.raise_for_status().json())


async def owners(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    listed = (await client.get("/v1/kedge/sessions")).raise_for_status().json()["sessions"]
    return {session["session_id"]: session for session in listed}


async def neighbours(client: httpx.AsyncClient, count: int, seed: str) -> list[Talker]:
    """New sessions on one replica; the sessions that landed on the other replica are closed."""
    talkers = [Talker(client, f"{seed}-{number}") for number in range(2 * count - 1)]
    for talker in talkers:
        await talker.open()
    owned = await owners(client)
    crowd, _ = Counter(owned[t.session_id]["replica_id"] for t in talkers).most_common(1)[0]
    chosen = [t for t in talkers if owned[t.session_id]["replica_id"] == crowd][:count]
    for talker in talkers:
        if talker not in chosen:
            await talker.close()
    return chosen


async def measure(name: str, url: str, load: Load, seed: str, pids: tuple[int, ...]) -> Round:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        talkers = await neighbours(client, load.sessions, seed)
        for talker in talkers:
            await talker.turn(load.history, 1)
            talker.turns.clear()
        before = await owners(client)
        meter, begin_s = CpuMeter(pids), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for talker in talkers:
                group.create_task(talker.talk(load, begin_s + load.seconds))
        shares, after = meter.read(), await owners(client)
        result = summary(name, [turn for talker in talkers for turn in talker.turns], begin_s, load.seconds)
        result.other_cores = None if shares is None else shares.other_cores
        mine = [after[talker.session_id] for talker in talkers]
        result.moves = sum(entry["epoch"] - before[entry["session_id"]]["epoch"] for entry in mine)
        result.sessions_at_end = sorted(Counter(entry["replica_id"] for entry in mine).values())
        await check(client, talkers, result)
        for talker in talkers:
            await talker.close()
    return result


def summary(name: str, turns: list[Turn], begin_s: float, seconds: float) -> Round:
    """The figures of a round. A turn's tokens count in the part of the round in which it ended."""
    half_s, end_s = begin_s + seconds / 2, begin_s + seconds
    late = [turn for turn in turns if half_s <= turn.ended_s < end_s]
    times_s = sorted(turn.ended_s - turn.begun_s for turn in late)
    return Round(
        name,
        tokens_per_s=sum(len(turn.output) for turn in turns if turn.ended_s < end_s) / seconds,
        late_tokens_per_s=sum(len(turn.output) for turn in late) / (seconds / 2),
        late_median_s=statistics.median(times_s),
        late_p95_s=times_s[int(0.95 * (len(times_s) - 1))],
        longest_s=max(turn.ended_s - turn.begun_s for turn in turns),
        computed_again_tokens=sum(max(0, len(t.prompt) - t.num_new - 1 - t.cached) for t in turns),
    )


async def check(client: httpx.AsyncClient, talkers: list[Talker], result: Round) -> None:
    """Asks for turns again as fresh requests: those with the fewest cached tokens, then those with the most."""
    turns = sorted((turn for talker in talkers for turn in talker.turns), key=lambda turn: turn.cached)
    for turn in [*turns[:CHECKED_TURNS], *turns[-CHECKED_TURNS:]]:
        fresh = await generate(client, turn.prompt, len(turn.output))
        result.checked += 1
        result.wrong += fresh["output_ids"] != turn.output


def show(rounds: list[Round], names: list[str]) -> None:
    table = Table("median of the rounds", *names)
    for title, figure in {
        "tokens/s": "tokens_per_s",
        "tokens/s, second half": "late_tokens_per_s",
        "turn, median s, second half": "late_median_s",
        "turn, p95 s, second half": "late_p95_s",
        "longest turn s": "longest_s",
        "moves": "moves",
        "tokens computed again": "computed_again_tokens",
        "answers wrong": "wrong",
        "cores of other processes": "other_cores",
    }.items():
        cells = []
        for name in names:
            values = [getattr(r, figure) for r in rounds if r.server == name]
            known = [value for value in values if value is not None]
            cells.append(f"{statistics.median(known):.2f}" if known else "?")
        table.add_row(title, *cells)
    Console().print(table)


def parse_server(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    return name, url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=parse_server, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--history", type=int, default=400)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=40.0)
    # With the same prompts a second run would find their prefixes cached.
    parser.add_argument("--seed", default=f"{random.randrange(2**31)}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = Load(args.sessions, args.history, args.new, args.output, args.seconds)
    pids = tuple({pid for _, url in args.server for pid in find_server_pids(url)})
    rounds = []
    for number in range(args.rounds):
        for name, url in args.server:
            rounds.append(asyncio.run(measure(name, url, load, f"{args.seed}-{number}", pids)))
            print(rounds[-1])
    show(rounds, [name for name, _ in args.server])
    if args.json is not None:
        record = {
            "machine": describe_machine(),
            "load": asdict(load),
            "rounds": [asdict(result) for result in rounds],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if any(result.wrong for result in rounds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
