"""Checks and times everything on one card, and prints one table.

    python -m benchmarks.gpu_report                         # all sections; from the repository root
    python -m benchmarks.gpu_report --sections ceilings,decode --limit-s 500 --json figures.json
    python -m benchmarks.gpu_report --dry                   # without a card: proves the paths, measures nothing

Each section runs in a process of its own with a time limit, so a section that fails, hangs or spoils the card's context
costs only its own rows. Figures go to benchmarks/results/gpu_<card>.json, which keeps the sections that were not run
this time. A dry run writes only to the file that --json names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import Record, SectionRecord
from benchmarks.gpu.rows import Row, RowFile, failed, markdown, skipped

ROOT = Path(__file__).resolve().parents[1]
LOOK_S = 0.5
GRACE_S = 10.0
"""From the time limit that a section is told to the moment its process is killed."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report. `entry` is module:function, a function of one Stage; `limit_s` is the limit on a card."""

    entry: str
    limit_s: float
    by_default: bool = True


SECTIONS = {
    "environment": Section("benchmarks.gpu.ceilings:run_environment", 60),
    "ceilings": Section("benchmarks.gpu.ceilings:run_ceilings", 90),
    "decode": Section("benchmarks.gpu.decode:run", 480),
    "attention": Section("benchmarks.gpu.attention:run", 240),
    "tiers": Section("benchmarks.gpu.tiers:run", 60),
    "sessions": Section("benchmarks.gpu.sessions:run", 540),
    "served": Section("benchmarks.gpu.served:run", 240),
    "operators": Section("benchmarks.gpu.operators:run", 180),
    "ordered": Section("benchmarks.gpu.ordered:run", 120),
    "checks": Section("benchmarks.gpu.checks:run", 420),
    "tune": Section("benchmarks.gpu.tune:run", 480, by_default=False),
}
"""In this order: where a card is lent for minutes, what is only known on a card comes first."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--sections", default=",".join(name for name in SECTIONS if SECTIONS[name].by_default)
    )
    parser.add_argument("--tune", action="store_true", help="also try the attention kernels' tile sizes")
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny shapes")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu_<card>.json")
    parser.add_argument("--limit-s", type=float, help="for all sections together")
    parser.add_argument("--limits", default="", help="for some sections: NAME=SECONDS, by commas")
    parser.add_argument(
        "--cases",
        default="",
        help="attention, decode, operators, tune: only cases whose names hold one of these",
    )
    parser.add_argument(
        "--tests",
        default="",
        help="checks: suites instead of the usual ones, by commas; paths of a suite by spaces",
    )
    parser.add_argument(
        "--model", choices=["8b", "1b", "tiny"], help="decode, sessions and served; default 8b, dry tiny"
    )
    parser.add_argument("--sessions", type=int, help="sessions at a time; default 64")
    parser.add_argument("--turns", type=int, help="of a session; default 20")
    parser.add_argument("--shared-tokens", type=int, help="of the history that sessions share; default 8192")
    parser.add_argument(
        "--step-tokens", type=int, default=8192, help="sessions: most tokens of a step of Kedge"
    )
    parser.add_argument("--peers", default="", help="of: torch-flash, sdpa, flash_attention_2; or none")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = [name for name in options.sections.split(",") if name] + ["tune"] * options.tune
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown sections {unknown}; there are {sorted(SECTIONS)}")
    limits = (each.partition("=") for each in options.limits.split(",") if each)
    options.limits = {name: float(limit) for name, _, limit in limits}
    if not options.dry:
        names.insert(0, "environment")  # says which machine the figures are from
    options.names = list(dict.fromkeys(names))
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.section is not None:
        if options.parent is not None:
            end_with(options.parent)
        run_section(options)
        return
    begin_s = time.monotonic()
    given = list(arguments) if arguments is not None else sys.argv[1:]
    record = Record(list(SECTIONS), options.dry)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names:
            left_s = options.limits.get(name, SECTIONS[name].limit_s)
            if options.limit_s is not None:
                left_s = min(left_s, options.limit_s - (time.monotonic() - begin_s))
            section_s = time.monotonic()
            rows = in_own_process(name, given, Path(folder), left_s)
            record.sections[name] = SectionRecord.now(rows, time.monotonic() - section_s, _settings(options))
            default = record.default_path(ROOT / "benchmarks" / "results")
            if path := options.json or default:
                record.save(path, also=default)
    print(markdown(record.rows, _title(record, options, time.monotonic() - begin_s), options.dry), flush=True)


def _title(record: Record, options: argparse.Namespace, spent_s: float) -> str:
    title = f"{record.card or 'no card'}, {spent_s:.0f} s"
    kept = [name for name in record.sections if name not in options.names]
    if kept:
        title += f"; from before: {', '.join(kept)}"
    return f"DRY RUN: not a measurement ({title})" if options.dry else title


def _settings(options: argparse.Namespace) -> dict[str, str]:
    told = (
        "cases",
        "tests",
        "model",
        "sessions",
        "turns",
        "shared_tokens",
        "step_tokens",
        "peers",
        "limit_s",
    )
    return {name: str(getattr(options, name)) for name in told if getattr(options, name)}


def in_own_process(name: str, arguments: list[str], folder: Path, limit_s: float) -> list[Row]:
    """The rows of one section, plus a row for the failure if it failed or did not end in time."""
    if limit_s < 2 * GRACE_S:
        return [skipped(name, "section", "no time left")]
    file = RowFile(folder / f"{name}.jsonl")
    command = [sys.executable, "-m", "benchmarks.gpu_report", *arguments, "--section", name]
    command += ["--rows", str(folder / f"{name}.jsonl"), "--deadline-s", str(limit_s - GRACE_S)]
    command += ["--parent", str(os.getpid())]
    begin_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit_s)
        rows = file.read()
        if status != 0:
            rows.append(failed(name, "section", f"ended with status {status}; its output has more"))
    except subprocess.TimeoutExpired:
        rows = [*file.read(), failed(name, "section", f"was ended after {limit_s:.0f} s")]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes it started
        process.wait()
    print(f"[{name}] took {time.monotonic() - begin_s:.1f} s", flush=True)
    return rows


def end_with(parent: int) -> None:
    """Ends this process, and those that it started, if the report is killed. Otherwise it would keep the card busy."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_section(options: argparse.Namespace) -> None:
    """Runs a section, in its own process."""
    begin_s = time.monotonic()
    if options.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    import torch

    from benchmarks.gpu.stage import Stage

    file = RowFile(options.rows)
    if not options.dry and not torch.cuda.is_available():
        file.add(skipped(options.section, "section", "torch sees no card; --dry runs without one"))
        return
    device = torch.device("cpu") if options.dry else torch.device("cuda", torch.cuda.current_device())
    stage = Stage(options.section, options.dry, device, file, begin_s + options.deadline_s, options)
    module, _, function = SECTIONS[options.section].entry.partition(":")
    getattr(importlib.import_module(module), function)(stage)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    if "--section" in sys.argv:
        os._exit(0)  # a thread that the section left behind could keep its process alive
