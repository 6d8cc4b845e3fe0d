"""What keys, tenants, limits and an encrypted log cost a turn: CPU time of the whole way in one process.

    python -m benchmarks.in_process.security_cost --json security_cost.json

It runs the HTTP application, a replica's turn, the engine on the null runner, and the session log in a file: everything
but Ray, the network and the model. The ways alternate in blocks, so other work on the machine affects each of them. The
share is of the time that a turn of 16 and 16 tokens takes through HTTP and Ray Serve with a model, all processes
together (`--turn-ms`).
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from controllers.cluster import Cluster
from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from serving.front.http import NO_KEYS, create_http_app
from serving.keys import API_KEYS, KeyRing
from tests.unit.serving.local_service import LocalService, client_of, small_text
from tests.unit.serving.replica_rig import LocalController, running_rig

BLOCKS, TURNS = 200, 12
TURN_MS = 32.0
"""For eight sessions behind HAProxy, the least that was measured (README.md, "Through Ray Serve")."""
NO_LIMITS = ClusterSettings()
LIMITS = ClusterSettings(tenant_sessions=1000, tenant_history_tokens=10**9)
KEYS = KeyRing({API_KEYS: ",".join(f"key-{number}=tenant-{number}" for number in range(100))})
PLAIN, ENCRYPTED = LogCipher(), LogCipher([secrets.token_bytes(KEY_BYTES)], encrypts=True)
WAYS = {
    "nothing": (False, PLAIN),
    "keys, tenants, limits": (True, PLAIN),
    "an encrypted log": (False, ENCRYPTED),
    "all of it": (True, ENCRYPTED),
}
"""For each way, whether there are keys and limits, and the log's cipher."""


@asynccontextmanager
async def client_for(way: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    guarded, cipher = WAYS[way]
    keys, settings = (KEYS, LIMITS) if guarded else (NO_KEYS, NO_LIMITS)
    tenants = {"max_turns_in_flight": 100, "max_queued_tokens": 10**6} if guarded else {}
    store: Any = SqliteSessionStore(folder / "log.sqlite3", cipher=cipher)
    controller = LocalController(Cluster(settings, store, time.time, time.perf_counter), store)
    async with (
        running_rig(folder, controller=controller, settings={"tenants": tenants}, text=small_text()) as rig,
        client_of(create_http_app(LocalService(rig), keys=keys)) as client,
    ):
        if guarded:
            client.headers["authorization"] = "Bearer key-50"
        yield client


async def block_us(client: httpx.AsyncClient) -> float:
    """CPU microseconds of one turn, over a session of TURNS turns."""
    body = {"prompt": "sixteen tokens!!", "max_tokens": 16, "ignore_eos": True}
    session = {"x-session-id": secrets.token_hex(8)}
    begun_s = time.process_time()
    for _ in range(TURNS):
        (await client.post("/v1/completions", json=body, headers=session)).raise_for_status()
    taken_s = time.process_time() - begun_s
    await client.delete(f"/v1/kedge/sessions/{session['x-session-id']}")
    return taken_s / TURNS * 1e6


async def measure() -> dict[str, list[float]]:
    taken_us: dict[str, list[float]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as stack:
        folders = {way: Path(stack.enter_context(tempfile.TemporaryDirectory())) for way in WAYS}
        clients = {way: await stack.enter_async_context(client_for(way, folders[way])) for way in WAYS}
        for number in range(BLOCKS + 1):
            for way, client in clients.items():
                us = await block_us(client)
                if number:
                    taken_us[way].append(us)
    return taken_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turn-ms", type=float, default=TURN_MS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    taken_us = asyncio.run(measure())
    base = taken_us["nothing"]
    table = Table("with", "CPU time of a turn here, µs", "more than without, µs", "of a served turn")
    rows = {}
    for way, values in taken_us.items():
        more = statistics.median(a - b for a, b in zip(values, base, strict=True))
        rows[way] = {
            "turn_us": statistics.median(values),
            "more_us": more,
            "share": more / args.turn_ms / 1e3,
        }
        table.add_row(way, f"{rows[way]['turn_us']:.0f}", f"{more:.0f}", f"{rows[way]['share']:.2%}")
    Console().print(table)
    save_record(args.json, turn_ms=args.turn_ms, blocks=BLOCKS, turns=TURNS, ways=rows)


if __name__ == "__main__":
    main()
