"""What the cluster controller's calls cost, and its memory, by the number of sessions that it holds.

    python -m benchmarks.in_process.controller_sessions --json benchmarks/results/controller_sessions.json
    python -m benchmarks.in_process.controller_sessions --against ../before --sessions 1000,100000

Each figure comes from a process of its own. It opens a log in a file with that many sessions, as a restarted controller
does. Ten replicas own the sessions. Times are CPU time of that process, which includes unpickling the messages; no wait
is included. `--against` names another checkout, which is measured in turn. A checkout from before heartbeats of changes
reports every session every time, lists all sessions, and commits turn by turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPLICAS = 10
IDLE_TIMEOUT_S = 86_400.0
CHANGED = 100
"""Sessions that have changed since a replica's previous heartbeat."""
IN_REPORT = 1000
TURNS_AT_ONCE = 64
PAGE = 1000
TURN_TOKENS = 24

COLUMNS = {
    "load_s": "start, s",
    "bytes_a_session": "bytes a session",
    "everything_s": "everything told, s",
    "idle_beat_us": "idle heartbeat, µs",
    "busy_beat_us": f"heartbeat, {CHANGED} changed, µs",
    "commit_us": "commit, µs",
    "resolve_us": "resolve, µs",
    "expire_us": "expiry, µs",
    "list_us": f"list of {PAGE}, µs",
    "stats_us": "figures, µs",
    "collect_ms": "full garbage collection, ms",
}


class Subject:
    """A controller over a log with that many sessions, of this checkout or of an earlier one."""

    def __init__(self, folder: str, sessions: int) -> None:
        from controllers import records
        from controllers.cluster import Cluster
        from controllers.session_log.sqlite_store import SqliteSessionStore
        from controllers.settings import ClusterSettings

        self._records = records
        self._sessions = sessions
        self.tells_changes = hasattr(records, "SessionReport")
        self._reports = [0] * REPLICAS
        self._turns: dict[int, int] = {}
        path = f"{folder}/sessions.sqlite3"
        fill(SqliteSessionStore(path), sessions)
        gc.collect()
        before = resident_bytes()
        settings = ClusterSettings(
            max_sessions=10**8, session_timeout_s=IDLE_TIMEOUT_S, replica_timeout_s=1e6
        )
        self.load_s = cpu_s(lambda: self._open(Cluster, settings, SqliteSessionStore(path)))
        for replica in range(REPLICAS):
            self.cluster.register_replica(self._status(replica))
        self.everything_s = sum(self.beat(replica, sessions) for replica in range(REPLICAS))
        gc.collect()
        self.bytes_a_session = (resident_bytes() - before) / sessions

    def _open(self, make: Any, settings: Any, store: Any) -> None:
        self.cluster = make(settings, store, time.time, time.monotonic)
        self.cluster._started_s = -math.inf  # otherwise nothing expires yet

    def beat(self, replica: int, changed: int) -> float:
        """CPU seconds of a heartbeat that reports at most `changed` of the replica's sessions."""
        own = range(replica, self._sessions, REPLICAS)
        size = IN_REPORT if self.tells_changes else len(own)
        told = own[:changed] if self.tells_changes else own
        return sum(self._tell(replica, told[at : at + size]) for at in range(0, max(1, len(told)), size))

    def _tell(self, replica: int, told: range) -> float:
        make = self._records.SessionStatus
        report: Any = [make(f"s{number}", 1, 0, 0, 5.0, False, False, 4096) for number in told]
        if self.tells_changes:
            since = self._reports[replica]
            self._reports[replica] += 1
            report = self._records.SessionReport(since + 1, since, tuple(report))
        message = pickle.dumps((self._status(replica), report))
        return cpu_s(lambda: self.cluster.heartbeat(*pickle.loads(message)))

    def _status(self, replica: int) -> Any:
        return self._records.ReplicaStatus(f"r{replica}", 10**6, 10**6)

    def commit(self, first: int) -> None:
        """Commits a group of turns, of sessions far from each other."""
        step = max(1, self._sessions // TURNS_AT_ONCE)
        records = [self._turn((first + number * step) % self._sessions) for number in range(TURNS_AT_ONCE)]
        if self.tells_changes:
            assert self.cluster.commits.commit(records) == [None] * TURNS_AT_ONCE
            return
        for record in records:
            self.cluster.commit_turn(record)

    def _turn(self, number: int) -> Any:
        turn = self._turns.get(number, 0)
        self._turns[number] = turn + 1
        key, start = f"call-{number:016x}{turn:016x}", TURN_TOKENS * turn
        return self._records.TurnRecord(
            f"s{number}", 1, turn, start, bytes(4 * TURN_TOKENS), 16, key, bytes(500)
        )

    def list(self) -> None:
        page = self.cluster.sessions(None, "s5", PAGE) if self.tells_changes else self.cluster.sessions()
        pickle.dumps(page)


def fill(store: Any, sessions: int) -> None:
    """Writes rows as the store does, all at once."""
    db, now_s = store._connection, time.time()
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO sessions (session_id, tenant, replica_id, epoch, tokens, turns, created_s, last_used_s, open_key)"
        " VALUES (?, '', ?, 1, 0, 0, ?, ?, ?)",
        ((f"s{at}", f"r{at % REPLICAS}", now_s, now_s, f"{at:032x}") for at in range(sessions)),
    )
    db.execute("COMMIT")
    store.disconnect()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def median_us(call: Callable[[int], object], times: int) -> float:
    return statistics.median(cpu_s(partial(call, at)) for at in range(times)) * 1e6


def worker(asked: dict[str, Any]) -> dict[str, float]:
    sessions = asked["sessions"]
    with tempfile.TemporaryDirectory(dir=asked["folder"]) as folder:
        subject = Subject(folder, sessions)
        cluster = subject.cluster
        times = 20 if subject.tells_changes else 3
        figures = cluster.measures if hasattr(cluster, "measures") else cluster.stats
        idle_s = statistics.median(subject.beat(at % REPLICAS, 0) for at in range(times))
        busy_s = statistics.median(subject.beat(at % REPLICAS, CHANGED) for at in range(times))
        return {
            "load_s": subject.load_s,
            "bytes_a_session": subject.bytes_a_session,
            "everything_s": subject.everything_s,
            "idle_beat_us": idle_s * 1e6,
            "busy_beat_us": busy_s * 1e6,
            "commit_us": median_us(subject.commit, 100) / TURNS_AT_ONCE,
            "resolve_us": median_us(lambda at: cluster.resolve(f"s{at % sessions}", False, ""), 200),
            "expire_us": median_us(lambda _: cluster.expire_idle(), times),
            "list_us": median_us(lambda _: subject.list(), times),
            "stats_us": median_us(lambda _: figures(), times),
            "collect_ms": cpu_s(gc.collect) * 1e3,
        }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("", *(f"{row['sessions']:,} {row['tree']}" for row in rows))
    for name, title in COLUMNS.items():
        table.add_row(
            title, *(f"{row[name]:,.2f}" if row[name] < 10 else f"{row[name]:,.0f}" for row in rows)
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--sessions", default="1000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--folder", help="of the log")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(worker(args.worker)))
        return
    from benchmarks.in_process.checkouts import measure_in_turn
    from benchmarks.measure import save_record

    rows = []
    for sessions in map(int, args.sessions.split(",")):
        asked = {"sessions": sessions, "folder": args.folder}
        found = measure_in_turn(__file__, asked, args.against, args.rounds)
        rows += [{"sessions": sessions, "tree": name} | each for name, each in found.items()]
    Console(width=40 + 20 * len(rows)).print(table_of(rows))
    settings = {"replicas": REPLICAS, "turns_at_once": TURNS_AT_ONCE, "rounds": args.rounds}
    save_record(args.json, settings=settings, rows=rows)


if __name__ == "__main__":
    main()
