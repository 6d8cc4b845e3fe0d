"""Takes the session log, or the controller, away for a while under streaming sessions: does a turn fail, is one lost or
doubled, how soon do all go on, and is any history computed again?

    make serve CONFIG=with_redis.yaml       # controller.redis_url names a Redis on this machine
    python benchmarks/outage.py --away redis --seconds 30 --json outage.json      # on the same machine

`--away redis` stops (SIGSTOP) the Redis of the log, `--away controller` the controller's actor;
`--away controller-dies` kills the actor again and again. Every turn is checked, in the ways that
benchmarks/session_talkers.py lists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import redis
from measure import machine
from processes import siblings
from rich.console import Console
from rich.table import Table
from session_talkers import GIVE_UP_S, Answer, Findings, Talker

CONTROLLER = "ray::ClusterController"
KILL_AGAIN_S = 0.25
ON_THE_WAY_S = 1.0
"""What was committed before may be heard of so much later."""


class Streaming(Talker):
    """Always streams, and notes when its turns ended and what of their histories had KV."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, seed: str) -> None:
        super().__init__(client, findings, seed, stream_share=1.0, leaving_share=0.0)
        self.ended_s: list[float] = []
        self.computed_again: list[int] = []

    def _note(self, new: list[int], answer: Answer, told: list[int]) -> None:
        self.ended_s.append(time.monotonic())
        history_len = len(self._history)
        if history_len and not answer.replayed:
            self.computed_again.append(max(0, history_len - 1 - answer.meta["cached_tokens"]))
        super()._note(new, answer, told)


@asynccontextmanager
async def away(what: str, info: dict[str, Any]) -> AsyncIterator[None]:
    """Something of the server that told `info` does not answer. Raises SystemExit if it is not on this machine."""
    replica_pid = info["replicas"][0]["pid"]
    if what == "controller-dies":
        killing = asyncio.create_task(_kill_on(replica_pid))
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        return
    pids = siblings(replica_pid, CONTROLLER)
    if what == "redis":
        url = info["settings"]["controller"]["redis_url"]
        if url is None:
            raise SystemExit("the session log is not in Redis")
        with redis.Redis.from_url(url) as client:
            pids = [client.info("server")["process_id"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _kill_on(replica_pid: int) -> None:
    while True:
        for pid in siblings(replica_pid, CONTROLLER):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(KILL_AGAIN_S)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What was found: figures that can be written as JSON."""
    findings = Findings()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=GIVE_UP_S, limits=limits) as client:
        talkers = [Streaming(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        info = (await client.get("/get_server_info")).json()
        until_s = time.monotonic() + args.before_s + args.seconds + args.after_s
        talks = [asyncio.create_task(talker.talk(until_s)) for talker in talkers]
        await asyncio.sleep(args.before_s)
        async with away(args.away, info):
            began_s = time.monotonic()
            await asyncio.sleep(args.seconds)
        back_s = time.monotonic()
        await asyncio.gather(*talks)
        listed = (await client.get("/v1/kedge/sessions")).json()["sessions"]
        by_id = {session["session_id"]: session for session in listed}
        for talker in talkers:
            await talker.check_end(by_id)
        audit = (await client.get("/v1/kedge/audit")).json()
    ended_s = [at_s for talker in talkers for at_s in talker.ended_s]
    went_on_s = [min(at_s for at_s in talker.ended_s if at_s > back_s) - back_s for talker in talkers]
    computed_again = [tokens for talker in talkers for tokens in talker.computed_again]
    return {
        "away_s": round(back_s - began_s, 2),
        "turns_before": sum(at_s < began_s for at_s in ended_s),
        "turns_ended_during": sum(began_s + ON_THE_WAY_S < at_s < back_s for at_s in ended_s),
        "went_on_after_s": [round(after_s, 3) for after_s in sorted(went_on_s)],
        "turns_that_computed_history_again": sum(tokens > 0 for tokens in computed_again),
        "tokens_computed_again": sum(computed_again),
        "all_checked": findings.all_checked,
        "audit_clean": bool(audit["clean"]),
        "findings": vars(findings),
    }


def show(figures: dict[str, Any]) -> None:
    table = Table("what", "figure")
    findings, went_on_s = figures["findings"], figures["went_on_after_s"]
    failures = ", ".join(f"{count} {code}" for code, count in findings["failures"].items()) or "none"
    for name, value in {
        "away": f"{figures['away_s']:.1f} s",
        "turns, tokens": f"{findings['turns']:,}, {findings['tokens']:,}",
        "turns that ended while it was away": f"{figures['turns_ended_during']:,}",
        "attempts that failed": failures,
        "from its return to each session's next end of a turn": f"median {statistics.median(went_on_s):.2f} s,"
        f" last {went_on_s[-1]:.2f} s",
        "turns that computed history again": f"{figures['turns_that_computed_history_again']:,}"
        f" ({figures['tokens_computed_again']:,} tokens)",
        "turns found in the log": f"{findings['logged']:,}",
        "turns whose answer is the model's": f"{findings['checked']:,}",
        "lost, doubled or wrong": f"{len(findings['wrong']):,}",
        "audit": "clean" if figures["audit_clean"] else "not clean",
    }.items():
        table.add_row(name, value)
    Console().print(table)
    for line in findings["wrong"][:20]:
        print(line[:2000])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--away", choices=("redis", "controller", "controller-dies"), default="redis")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is away")
    parser.add_argument("--before-s", type=float, default=10.0)
    parser.add_argument("--after-s", type=float, default=15.0)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    figures = asyncio.run(measure(args))
    show(figures)
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key not in ("url", "json")}
        record = {"machine": machine(), "settings": settings, **figures}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if figures["findings"]["wrong"] or not figures["audit_clean"] or not figures["all_checked"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
