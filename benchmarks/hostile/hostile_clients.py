"""Hostile clients beside ordinary ones: how much slower the ordinary clients get, and what the server holds.

    python -m benchmarks.hostile.hostile_clients --server-pid "$(pgrep -f 'kedge serve')" --json hostile_clients.json

Some sessions always have a streamed turn in flight. Each attack is measured in turn, without it and with it, A B A B.
An attack runs in a process of its own. On a machine of few cores the ordinary clients lack the CPU that it uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.hostile.hostile_connections import ATTACKS
from benchmarks.measure import save_record
from benchmarks.processes import Held, held_by

LONGEST_HISTORY = 600
SETTLE_S = 3.0
SAMPLE_S = 1.0
GIVE_UP_S = 120.0
END_S = 30.0
NO_SETTINGS = ("url", "server_pid", "json")
CALM_S = 15.0
"""After this time an attack that has ended should have left nothing behind."""


@dataclass
class Turns:
    """Turns of the ordinary sessions in one phase: seconds to the first token and to the end, and failures."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Phase:
    """A period with one attack, or with none. `peak` is the most that each kind of process held at a time."""

    turns: Turns
    peak: dict[str, Held]
    told: dict[str, int] = field(default_factory=dict)
    """What became of the attackers' connections and calls."""


class Sessions:
    """Ordinary clients, each with a streamed turn in flight at all times: 16 tokens in, `tokens_out` out."""

    def __init__(self, url: str, number: int, tokens_out: int) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=GIVE_UP_S,
            limits=httpx.Limits(max_connections=None),
            headers={"x-tenant-id": "ordinary"},
        )
        self._tokens_out = tokens_out
        self._tasks = [asyncio.create_task(self._talk(random.Random(index))) for index in range(number)]
        self.turns = Turns()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _talk(self, rng: random.Random) -> None:
        session_id, length = "", LONGEST_HISTORY
        while True:
            turns, began_s = self.turns, time.monotonic()
            try:
                if length >= LONGEST_HISTORY:
                    if session_id:
                        await self._client.post("/close_session", json={"session_id": session_id})
                    session_id, length = uuid.uuid4().hex, 0
                    opening = {"capacity_of_str_len": 0, "streaming": True, "session_id": session_id}
                    (await self._client.post("/open_session", json=opening)).raise_for_status()
                    began_s = time.monotonic()
                first_s = await self._turn(session_id, [rng.randrange(300, 900) for _ in range(16)])
            except httpx.HTTPError as error:
                turns.failures.append(repr(error)[:200])
                length = LONGEST_HISTORY
                await asyncio.sleep(0.5)
                continue
            length += 16 + self._tokens_out
            turns.first_s.append(first_s - began_s)
            turns.whole_s.append(time.monotonic() - began_s)

    async def _turn(self, session_id: str, tokens: list[int]) -> float:
        """The time at which its first token came. Raises httpx.HTTPError if the reply is not an answer."""
        sampling = {"max_new_tokens": self._tokens_out, "temperature": 0, "ignore_eos": True}
        body = {
            "input_ids": tokens,
            "stream": True,
            "sampling_params": sampling,
            "session_params": {"id": session_id},
        }
        first_s = 0.0
        async with self._client.stream("POST", "/generate", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not first_s and line.startswith("data: "):
                    first_s = time.monotonic()
                if '"error"' in line:
                    raise httpx.RemoteProtocolError(line)
        return first_s


@asynccontextmanager
async def attack(name: str, args: argparse.Namespace) -> AsyncIterator[dict[str, int]]:
    """Runs the attack in a process of its own until the context ends. Then the dictionary has its counts."""
    address = urlsplit(args.url)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "benchmarks.hostile.hostile_connections",
            name,
            address.hostname or "",
            str(address.port),
            str(args.scale),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told: dict[str, int] = {}
    try:
        yield told
    finally:
        try:
            async with asyncio.timeout(END_S):
                output, _ = await process.communicate(b"")
            told.update(json.loads(output))
        except TimeoutError:
            process.kill()


async def phase(sessions: Sessions, args: argparse.Namespace, name: str | None) -> Phase:
    sessions.turns = turns = Turns()
    if name is None:
        peak, told = await _peak(args), {}
    else:
        async with attack(name, args) as told:
            peak = await _peak(args)
            sessions.turns = Turns()  # turns that end after the attack do not count
    return Phase(turns, peak, told)


async def _peak(args: argparse.Namespace) -> dict[str, Held]:
    peak: dict[str, Held] = {}
    until_s = time.monotonic() + args.seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(SAMPLE_S)
        for role, held in (await asyncio.to_thread(held_by, args.server_pid)).items():
            peak[role] = held.most(peak.get(role, held))
    return peak


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def pooled(phases: Sequence[Phase]) -> Turns:
    every = Turns()
    for each in phases:
        every.first_s += each.turns.first_s
        every.whole_s += each.turns.whole_s
        every.failures += each.turns.failures
    return every


def figures(turns: Turns) -> dict[str, float]:
    return {
        "turns": len(turns.whole_s),
        "failed": len(turns.failures),
        "first_p50_s": quantile(turns.first_s, 0.5),
        "first_p99_s": quantile(turns.first_s, 0.99),
        "turn_p50_s": quantile(turns.whole_s, 0.5),
        "turn_p99_s": quantile(turns.whole_s, 0.99),
    }


async def measure(args: argparse.Namespace, name: str, sessions: Sessions) -> dict[str, Any]:
    before = held_by(args.server_pid)
    calm, attacked = list[Phase](), list[Phase]()
    for _ in range(args.rounds):
        calm.append(await phase(sessions, args, None))
        attacked.append(await phase(sessions, args, name))
        await asyncio.sleep(SETTLE_S)
    await asyncio.sleep(CALM_S)
    after = held_by(args.server_pid)
    peak = dict(before)
    for each in attacked:
        for role, held in each.peak.items():
            peak[role] = held.most(peak.get(role, held))
    without, beside = figures(pooled(calm)), figures(pooled(attacked))
    result = {
        "attack": name,
        "without": without,
        "with": beside,
        "ratios": {key: beside[key] / without[key] for key in without if key.endswith("_s") and without[key]},
        "rounds": [[figures(each.turns) for each in pair] for pair in zip(calm, attacked, strict=True)],
        "told": [each.told for each in attacked],
        "failures": pooled(attacked).failures[:20],
        "held": {
            role: {"before": asdict(before[role]), "peak": asdict(peak[role]), "after": asdict(after[role])}
            for role in sorted(before.keys() & after.keys())
        },
    }
    print(json.dumps({key: result[key] for key in ("attack", "without", "with", "told")}), flush=True)
    return result


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "attack", "turns, failed", "TTFT p50, p99 ms", "× without", "turn p50, p99 ms", "× without",
        "what grew most: MiB before, peak, after", "its files", title="ordinary sessions beside an attack",
    )  # fmt: skip
    for result in results:
        beside, ratios = result["with"], result["ratios"]
        role, held = max(
            result["held"].items(),
            key=lambda item: item[1]["peak"]["resident_bytes"] - item[1]["before"]["resident_bytes"],
        )
        moments = [held[moment] for moment in ("before", "peak", "after")]
        table.add_row(
            result["attack"],
            f"{beside['turns']:.0f}, {beside['failed']:.0f}",
            f"{1e3 * beside['first_p50_s']:.0f}, {1e3 * beside['first_p99_s']:.0f}",
            f"{ratios['first_p50_s']:.2f}, {ratios['first_p99_s']:.2f}",
            f"{1e3 * beside['turn_p50_s']:.0f}, {1e3 * beside['turn_p99_s']:.0f}",
            f"{ratios['turn_p50_s']:.2f}, {ratios['turn_p99_s']:.2f}",
            f"{role}: " + ", ".join(f"{moment['resident_bytes'] / 2**20:.0f}" for moment in moments),
            ", ".join(str(moment["num_files"]) for moment in moments),
        )
    return table


async def run(args: argparse.Namespace) -> None:
    sessions = Sessions(args.url, args.sessions, args.tokens_out)
    try:
        await asyncio.sleep(SETTLE_S)
        results = [await measure(args, name, sessions) for name in args.attacks]
    finally:
        await sessions.stop()
    Console(width=180).print(table_of(results))
    settings = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    save_record(args.json, settings=settings, results=results)
    first = statistics.median(result["ratios"]["first_p99_s"] for result in results)
    print(f"median ratio of the 99th percentiles of the time to the first token: {first:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--server-pid", type=int, required=True, help="what all of the server descends from")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--tokens-out", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of hostile connections")
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
