"""Kills processes of a running cluster while clients talk to it, and looks whether a token was lost, doubled or wrong.

    make serve
    python benchmarks/chaos.py --seconds 600 --every-s 15 --json chaos.json     # on the same machine

Every client has one session and a turn in flight at all times, streamed or not, and repeats a turn that failed with
its idempotency key. What a broken stream had told must be how the answer begins that the turn has in the end. Some
clients leave in mid-stream and come back. A share of the turns is asked again as one request with the whole history.
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
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from measure import machine
from rich.console import Console
from rich.table import Table

TOKENS = range(300, 900)
LONGEST_HISTORY = 1500
GIVE_UP_S = 120.0
PAUSE_S = 0.1
SILENCE_S = 1.0
"""A stream that says nothing for longer has been interrupted; on two busy cores a step may well take 0.1 s."""
STOPPED_S = 15.0
"""Longer than a replica may be silent."""
CHECKED_SHARE = 0.05
LEAVING_SHARE = 0.03
TITLES = {"controller": "ray::ClusterController", "ingress": "ray::ServeReplica:kedge:Ingress"}
KINDS = ("replica", "pause", *TITLES)


@dataclass
class Findings:
    """`failures` are attempts that a client had to repeat, by code; `wrong` is what must never be."""

    turns: int = 0
    tokens: int = 0
    repeated_turns: int = 0
    replayed_turns: int = 0
    left: int = 0
    checked: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    silences_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Failed(Exception):
    """An attempt that may be repeated."""


class Left(Exception):
    """The client has gone away, as it meant to."""


class Talker:
    """One client with one session at a time."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, seed: str) -> None:
        self._client = client
        self._findings = findings
        self._rng = random.Random(seed)
        self._session_id = ""
        self._history: list[int] = []

    async def talk(self, until_s: float) -> None:
        """Turns until then. Leaves its last session open."""
        while time.monotonic() < until_s:
            if not self._session_id or len(self._history) > LONGEST_HISTORY:
                await self._begin()
            await self._turn()

    async def check_end(self, sessions: dict[str, int]) -> None:
        """The server counts the tokens that the client has."""
        if sessions.get(self._session_id) != len(self._history):
            have, counts = len(self._history), sessions.get(self._session_id)
            self._findings.wrong.append(f"{self._session_id}: {have} tokens, the server has {counts}")

    async def _begin(self) -> None:
        name, self._history = f"chaos-{uuid.uuid4().hex[:12]}", []
        if self._session_id:
            await self._insist("/close_session", {"session_id": self._session_id})
        await self._insist("/open_session", {"capacity_of_str_len": 100_000, "session_id": name}, taken=True)
        self._session_id = name

    async def _turn(self) -> None:
        rng, findings = self._rng, self._findings
        new = rng.choices(TOKENS, k=rng.randint(1, 40))
        sampling = {"max_new_tokens": rng.choice((4, 16, 64, 200)), "temperature": 0, "ignore_eos": True}
        body = {"input_ids": new, "sampling_params": sampling, "session_params": {"id": self._session_id}}
        headers = {"idempotency-key": uuid.uuid4().hex}
        leaves_after = rng.randint(1, 20) if rng.random() < LEAVING_SHARE else None
        deadline_s, tries, told = time.monotonic() + GIVE_UP_S, 0, list[int]()
        while True:
            tries += 1
            heard: list[int] = []
            try:
                meta = await self._attempt(body, headers, rng.random() < 0.7, leaves_after, heard)
                break
            except Left:
                findings.left += 1
            except (Failed, httpx.HTTPError) as error:
                findings.failures[str(error) if isinstance(error, Failed) else type(error).__name__] += 1
            leaves_after = None
            told = max(told, heard, key=len)
            if time.monotonic() > deadline_s:
                findings.wrong.append(f"{self._session_id}: a turn was not answered in {GIVE_UP_S:.0f} s")
                self._session_id = ""
                return
            await asyncio.sleep(PAUSE_S)
        self._note(new, heard, told, meta)
        findings.repeated_turns += tries > 1
        if rng.random() < CHECKED_SHARE:
            await self._check(len(heard), sampling)

    def _note(self, new: list[int], output: list[int], told: list[int], meta: dict[str, Any]) -> None:
        findings, where = self._findings, f"{self._session_id} at {len(self._history)}"
        findings.turns += 1
        findings.tokens += len(output)
        if meta["prompt_tokens"] != len(self._history) + len(new):
            findings.wrong.append(f"{where}: {meta['prompt_tokens']} prompt tokens, not {len(new)} more")
        if meta["completion_tokens"] != len(output):
            findings.wrong.append(f"{where}: {meta['completion_tokens']} tokens counted, {len(output)} sent")
        if output[: len(told)] != told:
            findings.wrong.append(f"{where}: an earlier try said {told}, the answer is {output}")
        self._history += new + output

    async def _attempt(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        stream: bool,
        leaves_after: int | None,
        heard: list[int],
    ) -> dict[str, Any]:
        """One try; `heard` becomes the answer's tokens. Gives its meta_info. Raises Failed or Left."""
        request = self._client.build_request(
            "POST", "/generate", json=body | {"stream": stream}, headers=headers
        )
        reply = await self._client.send(request, stream=True)
        try:
            if reply.status_code != 200:
                await reply.aread()
                raise Failed(_code(reply))
            self._findings.replayed_turns += reply.headers.get("idempotent-replayed") == "true"
            if not stream:
                answer = json.loads(await reply.aread())
                heard[:] = answer["output_ids"]
                return dict(answer["meta_info"])
            return await self._listen(reply, leaves_after, heard)
        finally:
            await reply.aclose()

    async def _listen(
        self, reply: httpx.Response, leaves_after: int | None, heard: list[int]
    ) -> dict[str, Any]:
        meta: dict[str, Any] | None = None
        last_s, longest_s, count = time.monotonic(), 0.0, 0
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now_s, count = time.monotonic(), count + 1
            last_s, longest_s = now_s, max(longest_s, now_s - last_s if count > 1 else 0.0)
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(str(event["error"]["code"]))
            heard[:], meta = event["output_ids"], event["meta_info"]
            if count == leaves_after:
                raise Left
        if meta is None or meta["finish_reason"] is None:
            raise Failed("the stream broke off")
        if longest_s > SILENCE_S:
            self._findings.silences_s.append(longest_s)
        return meta

    async def _check(self, num_output: int, sampling: dict[str, Any]) -> None:
        body = {"input_ids": self._history[:-num_output], "sampling_params": sampling}
        fresh = (await self._insist("/generate", body)).json()["output_ids"]
        self._findings.checked += 1
        if fresh != self._history[-num_output:]:
            self._findings.wrong.append(f"{self._session_id}: {self._history[-num_output:]}, afresh {fresh}")

    async def _insist(self, path: str, body: dict[str, Any], *, taken: bool = False) -> httpx.Response:
        """Repeats what may be repeated until it is answered; `taken`: an earlier try may have opened the session."""
        deadline_s, first = time.monotonic() + GIVE_UP_S, True
        while True:
            try:
                reply = await self._client.post(path, json=body)
                if reply.status_code == 200 or (taken and not first and reply.status_code == 400):
                    return reply
                self._findings.failures[_code(reply)] += 1
            except httpx.HTTPError as error:
                self._findings.failures[type(error).__name__] += 1
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{path} was not answered in {GIVE_UP_S:.0f} s")
            first = False
            await asyncio.sleep(PAUSE_S)


class Chaos:
    """Strikes one process after another, each time when all replicas are up again."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, kinds: list[str], seed: int) -> None:
        self._client = client
        self._findings = findings
        self._kinds = kinds
        self._rng = random.Random(seed)

    async def run(self, every_s: float, until_s: float) -> None:
        count = len(await self.replicas())
        while time.monotonic() + every_s < until_s:
            await asyncio.sleep(every_s)
            pids = await self.replicas()
            if len(pids) == count:
                await self._strike(self._rng.choice(self._kinds), pids)

    async def replicas(self) -> list[int]:
        """Their process ids; those that answer."""
        try:
            reply = await self._client.get("/get_server_info")
            return [replica["pid"] for replica in reply.json()["replicas"]]
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    async def _strike(self, kind: str, replica_pids: list[int]) -> None:
        victims = replica_pids if kind not in TITLES else _siblings(replica_pids[0], TITLES[kind])
        if not victims:
            return
        victim = self._rng.choice(victims)
        self._findings.blows[kind] += 1
        if kind != "pause":
            os.kill(victim, signal.SIGKILL)
            return
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(victim, signal.SIGCONT)


def _siblings(pid: int, title: str) -> list[int]:
    """Processes with the same parent, Ray's node, and that title."""
    parent = _parent(pid)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("cmdline").read_text().startswith(title) and _parent(int(path.name)) == parent:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _code(reply: httpx.Response) -> str:
    try:
        return f"{reply.status_code} {reply.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{reply.status_code}"


async def measure(args: argparse.Namespace) -> tuple[Findings, bool]:
    """What was found, and whether the audit at the end is clean."""
    findings = Findings()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=GIVE_UP_S, limits=limits) as client:
        talkers = [Talker(client, findings, f"{args.seed}-{number}") for number in range(args.sessions)]
        chaos = Chaos(client, findings, args.strike, args.seed)
        until_s = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.run(args.every_s, until_s))
            for talker in talkers:
                group.create_task(talker.talk(until_s))
        listed = (await client.get("/v1/kedge/sessions")).json()["sessions"]
        counts = {session["session_id"]: session["tokens"] for session in listed}
        for talker in talkers:
            await talker.check_end(counts)
        audit = (await client.get("/v1/kedge/audit")).json()
    return findings, bool(audit["clean"])


def show(findings: Findings, clean: bool) -> None:
    table = Table("what", "figure")
    silences_s = findings.silences_s
    for name, value in {
        "turns, tokens": f"{findings.turns:,}, {findings.tokens:,}",
        "blows": ", ".join(f"{count} {kind}" for kind, count in findings.blows.items()) or "none",
        "attempts that failed": ", ".join(f"{n} {code}" for code, n in findings.failures.most_common())
        or "none",
        "turns that a client repeated": f"{findings.repeated_turns:,} ({findings.left:,} had left)",
        "of these answered from the log": f"{findings.replayed_turns:,}",
        f"answers silent for more than {SILENCE_S:.0f} s": f"{len(silences_s):,}"
        + (
            f", median {statistics.median(silences_s):.1f} s, longest {max(silences_s):.1f} s"
            if silences_s
            else ""
        ),
        "turns asked afresh": f"{findings.checked:,}",
        "lost, doubled or wrong": f"{len(findings.wrong):,}",
        "audit": "clean" if clean else "not clean",
    }.items():
        table.add_row(name, value)
    Console().print(table)
    for line in findings.wrong[:20]:
        print(line[:2000])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every-s", type=float, default=15.0, help="pause between two blows")
    parser.add_argument("--strike", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    findings, clean = asyncio.run(measure(args))
    show(findings, clean)
    if args.json is not None:
        settings = {
            "seconds": args.seconds,
            "every_s": args.every_s,
            "sessions": args.sessions,
            "seed": args.seed,
        }
        record = {
            "machine": machine(),
            "settings": settings,
            "findings": vars(findings),
            "audit_clean": clean,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if findings.wrong or not clean:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
