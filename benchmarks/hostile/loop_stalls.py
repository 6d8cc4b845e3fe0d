"""How long one request can hold the event loops of a served cluster: those of front end, replicas and controller.

    python -m benchmarks.hostile.loop_stalls --ray-address 127.0.0.1:6379 --json loop_stalls.json

First it sends each hostile body by itself, `--repeats` times on an idle cluster: the median of its longest stalls
counts. Then it sends all bodies and calls of two tenants at random, `--clients` at a time, for `--fuzz-s` seconds: the
longest stall counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.hostile.hostile_bodies import CONVERSATIONS, HostileBody, hostile_bodies
from benchmarks.hostile.loop_probe import LoopProbe, Stall
from benchmarks.measure import save_record
from serving.front.api.body_limits import BodyLimits
from tests.unit.serving.front.test_two_tenants import COMMON_IDS, Tenant, some_call

TIMEOUT_S = 120.0
SHOWN = 10
ORDINARY = "an ordinary turn"
NOTHING = "nothing for 2 s"
JSON = {"content-type": "application/json"}


@dataclass
class Measured:
    """One kind of request. `status` is the status of its last answer."""

    name: str
    status: int | str = ""
    stalls: dict[str, list[Stall]] = field(default_factory=dict)

    def note(self, longest: dict[str, Stall]) -> None:
        for part, stall in longest.items():
            self.stalls.setdefault(part, []).append(stall)

    def median_ms(self, part: str) -> float:
        return 1e3 * statistics.median(stall.own_s for stall in self.stalls[part])

    def worst_ms(self) -> float:
        return max(self.median_ms(part) for part in self.stalls if part != "Ray's proxy")

    def worst_part(self) -> str:
        return max((part for part in self.stalls if part != "Ray's proxy"), key=self.median_ms)

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "stalls_ms": {
                part: [
                    {"own": 1e3 * each.own_s, "late": 1e3 * each.late_s, "loop": 1e3 * each.loop_s}
                    for each in stalls
                ]
                for part, stalls in self.stalls.items()
            },
        }


async def measure_alone(
    client: httpx.AsyncClient, probe: LoopProbe, bodies: Sequence[HostileBody], repeats: int
) -> list[Measured]:
    found = []
    for body in bodies:
        measured = Measured(body.name)
        for number in range(repeats):
            probe.longest()
            measured.status = await send(client, body, f"{number}")
            measured.note(probe.longest())
        print(
            f"{measured.worst_ms():8.1f} ms  {measured.worst_part():10} {measured.status}  {body.name}",
            flush=True,
        )
        found.append(measured)
    return found


async def measure_nothing(probe: LoopProbe, repeats: int) -> Measured:
    measured = Measured(NOTHING, "–")
    for _ in range(repeats):
        probe.longest()
        await asyncio.sleep(2.0)
        measured.note(probe.longest())
    return measured


async def send(client: httpx.AsyncClient, body: HostileBody, key: str) -> int | str:
    """The answer's status, or the error's name. `key` is appended to an idempotency key, so that it is new."""
    headers = {name: value + key if name == "idempotency-key" else value for name, value in body.headers}
    try:
        async with client.stream("POST", body.path, content=body.content, headers=JSON | headers) as reply:
            async for _ in reply.aiter_raw():
                pass
    except httpx.HTTPError as error:
        return type(error).__name__
    return reply.status_code


async def prepared(client: httpx.AsyncClient, body: HostileBody) -> HostileBody:
    """The body with its whole path. Makes the conversation that it is for, if it is for one."""
    if not body.num_before:
        return body
    reply = await client.post(CONVERSATIONS, json={})
    reply.raise_for_status()
    path = f"{CONVERSATIONS}/{reply.json()['id']}{body.path}"
    for _ in range(body.num_before):
        (await client.post(path, content=body.content, headers=JSON)).raise_for_status()
    return replace(body, path=path, num_before=0)


async def fuzz(
    client: httpx.AsyncClient, bodies: Sequence[HostileBody], clients: int, seconds: float, seed: int
) -> dict[str, int]:
    """Returns how many calls had each status."""
    counts: dict[str, int] = {}
    until_s = time.monotonic() + seconds
    tenants = [Tenant(name, random.Random(f"{seed}-{name}")) for name in ("acme", "umbrella")]

    async def one(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        while time.monotonic() < until_s:
            if rng.random() < 0.3:
                status = await send(client, rng.choice(bodies), f"{rng.random()}")
            else:
                tenant = rng.choice(tenants)
                call = some_call(tenant, rng.choice((*COMMON_IDS, tenant.own_id())))
                headers = call.headers | {"x-tenant-id": tenant.name}
                reply = await client.request(call.method, call.path, json=call.body, headers=headers)
                status = reply.status_code
            counts[str(status)] = counts.get(str(status), 0) + 1

    await asyncio.gather(*map(one, range(clients)))
    return counts


def table_of(title: str, found: Sequence[Measured], parts: Sequence[str]) -> Table:
    table = Table("request", "status", *(f"{part}, ms" for part in parts), title=title)
    for measured in found:
        table.add_row(
            measured.name,
            str(measured.status),
            *(f"{measured.median_ms(part):.1f}" if part in measured.stalls else "–" for part in parts),
        )
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--ray-address", default="auto", help="of Ray's GCS")
    parser.add_argument("--controller", default="kedge-controller", help="the setting controller.name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="bodies with this in their names")
    parser.add_argument("--fuzz-s", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


async def run(args: argparse.Namespace, probe: LoopProbe) -> None:
    async with httpx.AsyncClient(base_url=args.url, timeout=TIMEOUT_S) as client:
        context_len = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        bodies = [await prepared(client, body) for body in chosen(args.only, context_len)]
        ordinary = HostileBody(
            ORDINARY, "/v1/completions", b'{"prompt": [5, 6, 7], "max_tokens": 64, "ignore_eos": true}'
        )
        floor = [await measure_nothing(probe, args.repeats)]
        floor += await measure_alone(client, probe, [ordinary], args.repeats)
        alone = await measure_alone(client, probe, bodies, args.repeats)
        probe.longest()
        mixed = Measured(f"{args.clients} at a time for {args.fuzz_s:.0f} s", "–")
        counts = await fuzz(client, bodies, args.clients, args.fuzz_s, args.seed)
        mixed.note(probe.longest())
    alone.sort(key=Measured.worst_ms, reverse=True)
    parts = sorted(probe.parts)
    Console(width=160).print(
        table_of("the longest stalls", [*alone[:SHOWN], mixed, *floor], parts), f"fuzz: {counts}"
    )
    save_record(
        args.json,
        settings={"repeats": args.repeats, "context_len": context_len, "seed": args.seed},
        floor=[each.record() for each in floor],
        alone=[each.record() for each in alone],
        fuzz=mixed.record() | {"answers": counts},
    )


def chosen(only: str, context_len: int) -> Iterator[HostileBody]:
    for body in hostile_bodies(context_len, BodyLimits.of_context(context_len).size_bytes):
        if only in body.name:
            yield body


def main() -> None:
    args = arguments()
    asyncio.run(run(args, LoopProbe(args.ray_address, args.controller)))


if __name__ == "__main__":
    main()
