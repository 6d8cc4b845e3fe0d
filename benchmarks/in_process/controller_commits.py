"""Turns per second through the cluster controller and its session log, as many streams commit one after another.

    python -m benchmarks.in_process.controller_commits --json benchmarks/results/controller_commits.json
    python -m benchmarks.in_process.controller_commits --ray --against ../before

It calls the methods of the actor's class in a process of their own, in which the streams run as well. With --ray it
sends turns to a real actor, as replicas do. `--against` names another checkout that is measured in turn. The log is in
a file, with and without a flush of the disk for each transaction, and in Redis where `redis-server` is installed. With
--shards several controllers run, each with its log, streams and process, and turns per second are those of all. Each
session has had --earlier-turns before: after ten, each turn pushes out the answer of an older turn. With --cut each
turn goes back so many tokens, as with templates that leave earlier thoughts out, and with --note it keeps so many bytes
of what was said. CPU time is that of the controller's process. The table's title says how long a flush takes on this
disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

INPUT_TOKENS, OUTPUT_TOKENS = 16, 8
TURN_TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
ANSWER = b"x" * 500
STREAMS = (16, 256)
REPLICAS = 8
"""How many replicas call the actor with --ray."""
FILE, FLUSHED_FILE, REDIS = "file", "file, full_sync", "redis"
FLUSHES = 50
REDIS_STOP_S = 30.0

Commit = Callable[[Any], Awaitable[object]]


class Streams:
    """Streams that each commit to their own sessions, one turn after another. `took_s`: the seconds of each turn."""

    def __init__(self, commits: list[Commit], asked: dict[str, Any]) -> None:
        from controllers.records import ModelFingerprint, TurnRecord
        from controllers.tokens import encode_tokens

        self._make = TurnRecord
        self._model = ModelFingerprint("a" * 64, "b" * 64, "c" * 64)
        self._tokens = encode_tokens(range(TURN_TOKENS))
        self._commits = commits
        self._streams = asked["streams"]
        self._new_tokens = TURN_TOKENS - asked["cut"]
        self._note = b"n" * asked["note"]
        self._turns = [0] * asked["sessions"]
        self.took_s: list[float] = []

    async def run(self, goes_on: Callable[[], bool]) -> None:
        await asyncio.gather(*(self._stream(number, goes_on) for number in range(self._streams)))

    async def _stream(self, number: int, goes_on: Callable[[], bool]) -> None:
        commit = self._commits[number % len(self._commits)]
        while True:
            for session in range(number, len(self._turns), self._streams):
                if not goes_on():
                    return
                began_s = time.perf_counter()
                await commit(self._record(session))
                self.took_s.append(time.perf_counter() - began_s)
                self._turns[session] += 1

    def _record(self, session: int) -> Any:
        turn = self._turns[session]
        return self._make(
            session_id=f"s{session}",
            epoch=1,
            turn_index=turn,
            start_len=turn * self._new_tokens,
            tokens=self._tokens,
            input_len=INPUT_TOKENS,
            idempotency_key=f"call-{session:016x}{turn:016x}",
            result=ANSWER,
            digest="d" * 64,
            model=self._model,
            note=self._note,
        )


async def measure(
    commits: list[Commit],
    open_session: Callable[[str], Awaitable[object]],
    cpu_s: Callable[[], Awaitable[float]],
    asked: dict[str, Any],
) -> dict[str, float]:
    """Commits with all streams for `asked["seconds"]`. `cpu_s` returns the controller's CPU time."""
    for number in range(asked["sessions"]):
        await open_session(f"s{number}")
    streams = Streams(commits, asked)
    await streams.run(lambda: len(streams.took_s) < asked["earlier_turns"] * asked["sessions"])
    streams.took_s.clear()
    cpu_before_s, began_s = await cpu_s(), time.perf_counter()
    await streams.run(lambda: time.perf_counter() - began_s < asked["seconds"])
    lasted_s, took_s = time.perf_counter() - began_s, sorted(streams.took_s)
    return {
        "turns_per_s": len(took_s) / lasted_s,
        "controller_cpu_us": (await cpu_s() - cpu_before_s) / len(took_s) * 1e6,
        "p50_ms": took_s[len(took_s) // 2] * 1e3,
        "p99_ms": took_s[int(len(took_s) * 0.99)] * 1e3,
    }


async def through_methods(asked: dict[str, Any]) -> dict[str, float]:
    from controllers.cluster_actor import ClusterController
    from controllers.records import ReplicaStatus
    from controllers.settings import ClusterSettings

    controller = ClusterController(ClusterSettings(), log_of(asked), "cluster")
    await controller.register_replica(ReplicaStatus("a", 10**6, 10**6))

    async def open_session(name: str) -> None:
        await controller.open_session(name, "", None, None, name)

    async def commit(record: Any) -> None:
        assert await controller.commit_turns([record]) == [None]

    async def cpu_s() -> float:
        return time.process_time()

    return await measure([commit], open_session, cpu_s, asked)


async def through_ray(asked: dict[str, Any]) -> dict[str, float]:
    import ray

    from controllers.cluster_actor import ClusterController
    from controllers.records import ReplicaStatus
    from controllers.settings import ClusterSettings
    from serving.wire.controller_calls import ControllerCalls
    from serving.wire.shard_calls import ShardCalls

    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    actor_class = ray.remote(ClusterController).options(num_cpus=0)
    connection: dict[str, Any] = {}
    try:
        from serving.wire.commit_server import serve_commits
    except ImportError:  # an earlier checkout, whose turns are calls of the actor
        actor = actor_class.remote(ClusterSettings(), log_of(asked), "cluster")
    else:
        connection = {"node_id": ray.get_runtime_context().get_node_id()}
        actor = actor_class.remote(ClusterSettings(), log_of(asked), "cluster", serve_commits)
    calls = [
        ControllerCalls([ShardCalls(lambda: actor, timeout_s=30.0, **connection)]) for _ in range(REPLICAS)
    ]
    await calls[0].register_replica(ReplicaStatus("a", 10**6, 10**6))

    async def open_session(name: str) -> None:
        await calls[0].open_session(name, "", None, None, name)

    async def cpu_s() -> float:
        return float(await actor.__ray_call__.remote(lambda _: __import__("time").process_time()))

    return await measure([each.commit_turn for each in calls], open_session, cpu_s, asked)


def through_shards(asked: dict[str, Any]) -> dict[str, float]:
    """Several controllers at the same time, each as when it is alone. Turns per second are those of all together, the
    other figures means."""
    alone = json.dumps(asked | {"shards": 1})
    workers = [
        subprocess.Popen([sys.executable, __file__, "--worker", alone], stdout=subprocess.PIPE, text=True)
        for _ in range(asked["shards"])
    ]
    found = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    together = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    return together | {"turns_per_s": sum(each["turns_per_s"] for each in found)}


def log_of(asked: dict[str, Any]) -> Any:
    from controllers.settings import RedisLogSettings, SqliteLogSettings

    if asked["log"] == REDIS:
        return RedisLogSettings(asked["redis"], f"log{os.getpid()}")
    folder = tempfile.mkdtemp(dir=asked["folder"])
    return SqliteLogSettings(f"{folder}/sessions.sqlite3", full_sync=asked["log"] == FLUSHED_FILE)


@contextmanager
def redis_server(folder: str) -> Iterator[str | None]:
    """A Redis that appends each write to a file and flushes it each second. Yields its address, or None if Redis is
    not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kr") as short:  # sockets need a short path
        options = ["--port", "0", "--unixsocket", f"{short}/s", "--dir", folder, "--appendonly", "yes"]
        server = subprocess.Popen([program, *options, "--save", ""], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        next(line for line in server.stdout if "ready to accept connections" in line.lower())
        try:
            yield f"unix://{short}/s"
        finally:
            server.terminate()  # it then ends the process that rewrites its file, too
            server.wait(REDIS_STOP_S)


def flush_ms(folder: str) -> float:
    """Median time of a flush after some kilobytes were appended to a file."""
    took_s = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(FLUSHES):
            file.write(bytes(4096))
            file.flush()
            began_s = time.perf_counter()
            os.fsync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s) * 1e3


def measured(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.in_process.checkouts import measure_in_turn

    rows = []
    shape = {name: getattr(args, name) for name in ("sessions", "earlier_turns", "cut", "note")}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, redis_server(folder) as redis:
        flushes = [flush_ms(folder)]
        for log in (FILE, FLUSHED_FILE, REDIS) if redis else (FILE, FLUSHED_FILE):
            for streams in STREAMS:
                asked = {"log": log, "streams": streams, "seconds": args.seconds, "ray": args.ray}
                asked |= shape | {"shards": args.shards, "folder": folder, "redis": redis}
                found = measure_in_turn(__file__, asked, args.against, args.rounds)
                rows += [
                    {"log": log, "streams": streams, "tree": name} | each for name, each in found.items()
                ]
            flushes.append(flush_ms(folder))
    settings = {"through": "a Ray actor" if args.ray else "the actor's methods"} | shape
    settings |= {"tokens_a_turn": TURN_TOKENS, "answer_bytes": len(ANSWER)}
    settings |= {"seconds": args.seconds, "rounds": args.rounds, "shards": args.shards}
    return {"settings": settings, "flush_ms": flushes, "rows": rows}


def table_of(found: dict[str, Any]) -> Table:
    flush = statistics.median(found["flush_ms"])
    table = Table(title=f"through {found['settings']['through']}; a flush takes {flush:.2f} ms")
    for name in ("log", "streams", "", "turns/s", "CPU a turn, µs", "p50, ms", "p99, ms"):
        table.add_column(name)
    for row in found["rows"]:
        cells = [row["log"], str(row["streams"]), row["tree"], f"{row['turns_per_s']:,.0f}"]
        table.add_row(
            *cells, f"{row['controller_cpu_us']:.0f}", f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument(
        "--ray", action="store_true", help="through a real actor, on a Ray cluster of its own"
    )
    parser.add_argument("--shards", type=int, default=1, help="controllers at the same time")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--earlier-turns", type=int, default=10, help="of each session")
    parser.add_argument("--cut", type=int, default=0, help="the tokens that each turn goes back")
    parser.add_argument("--note", type=int, default=0, help="the bytes of what each turn says")
    parser.add_argument("--folder", type=Path, help="of the log: the disk to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.sessions < max(STREAMS):
        parser.error(f"--sessions: one for each of {max(STREAMS)} streams")
    if args.worker is not None and args.worker["shards"] > 1:
        print(json.dumps(through_shards(args.worker)))
        return
    if args.worker is not None:
        through = through_ray if args.worker["ray"] else through_methods
        print(json.dumps(asyncio.run(through(args.worker))))
        return
    from benchmarks.measure import save_record

    found = measured(args)
    Console(width=110).print(table_of(found))
    save_record(args.json, **found)


if __name__ == "__main__":
    main()
