"""What a turn costs through HTTP and Ray Serve: TTFT early and late in a session, time per token, tokens/s.

Drives `kedge bench` against running servers, several rounds in turn (A B A B), and prints medians over the rounds that
were not rejected. With one server it measures that one; with several they are compared in the same run:

    chrt -f 50 python -m benchmarks.served.serve_overhead --json serve.json
    chrt -f 50 python -m benchmarks.served.serve_overhead --server kedge=http://127.0.0.1:8000,session \\
        --server llama.cpp=http://127.0.0.1:8080,resend
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXIT_REJECTED = 3


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test. `pids` are the processes that all its processes descend from."""

    name: str
    url: str
    mode: str
    pids: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Server:
        """`name=url,mode[,pid...]`"""
        name, _, rest = text.partition("=")
        url, mode, *pids = rest.split(",")
        if mode not in ("session", "resend"):
            raise argparse.ArgumentTypeError(f"mode must be session or resend, not {mode!r}")
        return cls(name, url, mode, tuple(map(int, pids)))


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of load. Tokens are per turn."""

    name: str
    sessions: int
    turns: int
    input_tokens: int
    output_tokens: int


CASES = (
    Case("1 session, 16 in + 16 out", 1, 20, 16, 16),
    Case("8 sessions, 16 in + 16 out", 8, 20, 16, 16),
    Case("1 session, 16 in + 128 out", 1, 5, 16, 128),
    Case("1 session, 256 in + 8 out", 1, 20, 256, 8),
    Case("1 session, 16 in + 8 out", 1, 20, 16, 8),
    Case("8 sessions, 16 in + 8 out", 8, 20, 16, 8),
)


def run_case(server: Server, case: Case, seed: int, extra: list[str]) -> dict[str, Any] | None:
    """The run's JSON, or None if the run was rejected. Raises if the server cannot be measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-c", "from serving.cli.main import main; main()", "bench"]
        command += ["--url", server.url, "--mode", server.mode, "--json", str(out), "--seed", str(seed)]
        command += [
            "--sessions",
            str(case.sessions),
            "--turns",
            str(case.turns),
            "--warmup",
            str(case.sessions),
        ]
        command += ["--input-tokens", str(case.input_tokens), "--output-tokens", str(case.output_tokens)]
        command += [word for pid in server.pids for word in ("--server-pid", str(pid))]
        done = subprocess.run([*command, *extra], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, EXIT_REJECTED):
            raise SystemExit(f"{server.name}: kedge bench failed\n{done.stdout}")
        document: dict[str, Any] = json.loads(out.read_text())
    settings = document["settings"]
    settings["model"] = Path(settings["model"]).name  # some servers tell the folder that they read it from
    for reason in document["summary"]["rejected"]:
        Console(stderr=True, soft_wrap=True).print(
            f"{server.name}, {case.name}: rejected: {reason}", markup=False
        )
    return None if document["summary"]["rejected"] else document


def median(runs: list[dict[str, Any]], *path: str) -> float | None:
    """Median over runs of one figure of their summaries; None if no run has it."""
    values = []
    for run in runs:
        value: Any = run["summary"]
        for name in path:
            value = value.get(name) if value is not None else None
        if value is not None:
            values.append(float(value))
    return statistics.median(values) if values else None


def late_bucket(case: Case) -> str:
    return f"turns {max(case.turns - 4, 6)}-{case.turns}" if case.turns > 5 else "-"


def row(server: Server, case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one server under one case; times in milliseconds."""
    early = f"turns 2-{min(5, case.turns)}"

    def ms(*path: str) -> float | None:
        value = median(runs, *path)
        return None if value is None else value * 1e3

    return {
        "server": server.name,
        "case": case.name,
        "runs": len(runs),
        "ttft_p50_ms": ms("ttft", "all turns", "p50"),
        "ttft_p99_ms": ms("ttft", "all turns", "p99"),
        "ttft_early_p50_ms": ms("ttft", early, "p50"),
        "ttft_late_p50_ms": ms("ttft", late_bucket(case), "p50"),
        "per_token_p50_ms": ms("time_per_token", "p50"),
        "output_tokens_per_s": median(runs, "output_tokens_per_s"),
        "cached_share": median(runs, "cached_share"),
    }


def earlier_runs(path: Path | None) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs in a file, by server and case. Servers that cannot run side by side are measured in turn this way."""
    if path is None or not path.exists():
        return {}
    measured = json.loads(path.read_text())["measured"]
    return {(part["server"]["name"], part["case"]["name"]): part["runs"] for part in measured}


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="medians over rounds; times in ms")
    for name in rows[0]:
        table.add_column(
            name.removesuffix("_ms").replace("_", " "),
            justify="left" if name in ("server", "case") else "right",
        )
    for figures in rows:
        table.add_row(
            *(
                f"{value:,.2f}" if isinstance(value, float) else str(value or "-")
                for value in figures.values()
            )
        )
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Server("kedge", "http://127.0.0.1:8000", "session", ())
    parser.add_argument("--server", type=Server.parse, action="append", metavar="NAME=URL,MODE[,PID...]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", action="append", metavar="WORDS", help="only cases whose name holds these words"
    )
    parser.add_argument("--json", type=Path, help="runs are added to those that the file has already")
    arguments, extra = parser.parse_known_args()  # the rest goes to kedge bench
    servers: list[Server] = arguments.server or [default]
    cases = [
        case for case in CASES if not arguments.case or any(words in case.name for words in arguments.case)
    ]
    runs = earlier_runs(arguments.json)
    for case in cases:
        for number in range(arguments.rounds):
            for server in servers:
                document = run_case(server, case, number, extra)
                if document is not None:
                    del document["turns"]  # the summary has their percentiles
                    runs.setdefault((server.name, case.name), []).append(document)
    rows = [row(server, case, runs.get((server.name, case.name), [])) for case in cases for server in servers]
    print_table(rows)
    if arguments.json is not None:
        all_runs = [
            {"server": asdict(server), "case": asdict(case), "runs": runs.get((server.name, case.name), [])}
            for case in cases
            for server in servers
        ]
        arguments.json.write_text(json.dumps({"medians": rows, "measured": all_runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
