"""What benchmarks with session talkers share: arguments, client, checks at the end, and the JSON record."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.failures.session_talkers import GIVE_UP_S, Findings, Talker
from benchmarks.measure import save_record

MOST_SHOWN = 20
"""Faults to print; the record has all of them."""
NO_SETTINGS = ("url", "dashboard", "ray_address", "config", "json")


def talk_arguments(description: str | None, sessions: int) -> argparse.ArgumentParser:
    """A parser with the options that every such benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=sessions, help="clients, with a session each")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    return parser


def open_client(args: argparse.Namespace) -> httpx.AsyncClient:
    """A client for `--url`, for any number of streams."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=args.url, timeout=GIVE_UP_S, limits=limits)


@asynccontextmanager
async def talking(talkers: Sequence[Talker]) -> AsyncIterator[None]:
    """Keeps a turn of every talker in flight. At the end each ends its turn and has its answers checked."""
    over = asyncio.Event()

    async def talk(talker: Talker) -> None:
        while not over.is_set():
            await talker.next_turn()
        await talker.check_answers()

    async with asyncio.TaskGroup() as group:
        for talker in talkers:
            group.create_task(talk(talker))
        try:
            yield
        finally:
            over.set()


async def check_ends(client: httpx.AsyncClient, talkers: Sequence[Talker]) -> bool:
    """Checks that the server agrees with each client about its session. Returns whether the audit is clean."""
    listed = (await client.get("/v1/kedge/sessions")).json()["sessions"]
    by_id = {session["session_id"]: session for session in listed}
    for talker in talkers:
        await talker.check_end(by_id)
    return bool((await client.get("/v1/kedge/audit")).json()["clean"])


def failures_line(findings: Findings) -> str:
    """The attempts that clients had to repeat, by code."""
    return ", ".join(f"{count} {code}" for code, count in findings.failures.most_common()) or "none"


def conclude(
    args: argparse.Namespace, findings: Findings, audit_clean: bool, figures: dict[str, Any]
) -> None:
    """Prints what was wrong and writes the record. Raises SystemExit if anything was wrong or is unchecked."""
    for line in findings.wrong[:MOST_SHOWN]:
        print(line[:2000])
    save_record(
        args.json,
        settings={name: value for name, value in vars(args).items() if name not in NO_SETTINGS},
        **figures,
        all_checked=findings.all_checked,
        audit_clean=audit_clean,
        findings=vars(findings),
    )
    if findings.wrong or not audit_clean or not findings.all_checked:
        raise SystemExit(1)
