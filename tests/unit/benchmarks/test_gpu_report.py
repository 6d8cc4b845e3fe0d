"""The report for a card, run without a card: its cheap sections, and sections that fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_report
from benchmarks.gpu.record import Record, SectionRecord
from benchmarks.gpu.rows import Row, RowFile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def dry_run(path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Runs the report. Returns the JSON that it writes, and the table."""
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--dry", "--json", str(path), *options]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(path.read_text()), answer.stdout[answer.stdout.index("## DRY RUN: not a measurement") :]


def test_a_dry_run_measures_nothing_and_says_so(tmp_path: Path) -> None:
    options = ["--sessions", "2", "--turns", "2", "--peers", "none"]
    written, table = dry_run(
        tmp_path / "figures.json", "--sections", "environment,ceilings,sessions", *options
    )
    assert written["dry_run"] is True
    assert written["card"] is None
    assert list(written["sections"]) == ["environment", "ceilings", "sessions"]
    rows = [row for part in written["sections"].values() for row in part["rows"]]
    assert all(row["verdict"] == "dry run: not a measurement" for row in rows), rows
    assert all(f"{row['section']}: {row['item']}" in table for row in rows)
    kedge = next(row for row in rows if row["item"] == "Kedge, steps of 8,192: 2 sessions, turns 2–2")
    assert kedge["measured"] > 0
    assert kedge["details"]["turns"] == 2


def test_kernels_are_checked_where_they_are_timed(tmp_path: Path) -> None:
    written, _ = dry_run(
        tmp_path / "figures.json",
        "--sections",
        "operators,attention",
        "--cases",
        "decode,norm,kv_write,greedy",
    )
    rows = [row for part in written["sections"].values() for row in part["rows"]]
    assert [row["item"] for row in rows] == [
        "decode 2 × 40, bf16 KV",
        "decode 2 × 40, fp8 KV",
        "ragged decode 3 + 1, bf16 KV",
        "rms_norm + residual, 2 rows",
        "kv_write, 2 rows",
        "rms_norm + residual, 5 rows",
        "kv_write, 5 rows",
        "pick of 2 × 300, greedy",
    ]
    assert {row["outcome"] for row in rows} == {"measured"}, rows


def test_a_card_is_measured_in_parts(tmp_path: Path) -> None:
    names = ["environment", "attention", "decode"]

    def record(card: str, **rows: float) -> Record:
        made = Record(names, dry=False)
        made.sections["environment"] = SectionRecord.now(
            [Row("environment", "memory", details={"card": card})], 1.0, {}
        )
        for name, measured in rows.items():
            made.sections[name] = SectionRecord.now(
                [Row(name, "item", measured, share=0.5, target=0.4)], 2.0, {}
            )
        return made

    path = record("NVIDIA H100 80GB HBM3").default_path(tmp_path)
    assert path == tmp_path / "gpu_nvidia_h100_80gb_hbm3.json"
    record("H100", decode=1.0).save(path)
    record("H100", attention=2.0).save(path)
    last = record("H100", attention=3.0)
    last.save(path)
    assert [row.measured for row in last.rows] == [None, 3.0, 1.0]
    assert list(json.loads(path.read_text())["sections"]) == names
    elsewhere = record("H100", decode=5.0)
    elsewhere.save(tmp_path / "elsewhere.json", also=path)
    assert [row.measured for row in elsewhere.rows] == [None, 3.0, 5.0]
    other = record("H200", attention=4.0)
    other.save(path)
    assert [row.measured for row in other.rows] == [None, 4.0]


def test_without_a_card_sections_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "rows.jsonl"
    gpu_report.main(["--section", "ceilings", "--rows", str(path), "--deadline-s", "60"])
    (row,) = RowFile(path).read()
    assert (row.outcome, row.section) == ("skipped", "ceilings")
    assert "--dry" in row.note


def test_a_section_that_breaks_costs_its_own_rows(tmp_path: Path) -> None:
    (row,) = gpu_report.in_own_process("ceilings", ["--dry", "--sessions", "not a number"], tmp_path, 60.0)
    assert row.outcome == "failed"
    assert "status 2" in row.note


def test_a_section_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "GRACE_S", 0.05)
    (row,) = gpu_report.in_own_process("ceilings", ["--dry"], tmp_path, 0.2)
    assert row.outcome == "failed"
    assert "was ended" in row.note


def test_a_section_ends_with_a_report_that_is_killed(tmp_path: Path) -> None:
    """Where a card is lent, a call past its time is killed. What it started would keep the card busy."""
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--dry", "--sections", "sessions"]
    report = subprocess.Popen([*command, "--json", str(tmp_path / "figures.json")], cwd=ROOT)
    children = Path(f"/proc/{report.pid}/task/{report.pid}/children")
    try:
        section = int(_once(lambda: children.read_text().split())[0])
    finally:
        report.kill()
        report.wait()
    assert _once(lambda: not Path(f"/proc/{section}").exists())


def _once(look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it finds something."""
    deadline_s = time.monotonic() + 30.0
    while not (found := look()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


def test_no_time_is_left_for_a_section(tmp_path: Path) -> None:
    (row,) = gpu_report.in_own_process("ceilings", ["--dry"], tmp_path, 1.0)
    assert row.outcome == "skipped"


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_report.parse(["--sections", "ceilings,ceiling"])
    assert "['ceiling']" in capsys.readouterr().err
