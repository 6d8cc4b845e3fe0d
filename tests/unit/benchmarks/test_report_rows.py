"""What the report for a card says of its figures, and what it leaves out for lack of room."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.busy import DEVICE_KINDS, read_busy
from benchmarks.gpu.rows import Row, RowFile, failed, markdown, skipped


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("s", "fast enough", 9.0, share=0.85, target=0.85), "reached"),
        (Row("s", "too slow", 9.0, share=0.84, target=0.85), "MISSED"),
        (Row("s", "short enough", 9.0, share=0.2, target=0.2, goal="at_most"), "reached"),
        (Row("s", "too long", 9.0, share=0.21, target=0.2, goal="at_most"), "MISSED"),
        (Row("s", "without a target", 9.0, share=0.5), "–"),
        (failed("s", "broken", "why"), "failed"),
        (skipped("s", "not tried", "why"), "skipped"),
    ],
)
def test_verdicts(row: Row, verdict: str) -> None:
    assert row.verdict(dry=False) == verdict
    if row.outcome == "measured":
        assert row.verdict(dry=True) == "dry run: not a measurement"


def test_a_row_shows_its_figures() -> None:
    rows = [Row("attention", "decode", 2612.4, "GB/s", 3000.0, 0.8708, 0.85, note="a | b\nc")]
    table = markdown(rows, "Some card", dry=False).splitlines()
    assert table[0] == "## Some card"
    assert (
        table[-1] == "| attention: decode | 2,612 GB/s | 3,000 GB/s | 87.1 % | ≥ 85.0 % | reached | a / b c |"
    )


def test_the_table_fits_and_keeps_what_has_a_target() -> None:
    goals = [Row("s", f"goal {n}", 1.0, share=0.5, target=0.8, note="n" * 200) for n in range(5)]
    others = [Row("s", f"figure {n}", 1.0, note="n" * 200) for n in range(100)]
    broken = [failed("s", f"broken {n}", "n" * 200) for n in range(3)]
    table = markdown([*others, *goals, *broken], "Some card", dry=False, most=2000)
    assert len(table) <= 2000
    assert all(row.item in table for row in [*goals, *broken])
    assert "rows are in the JSON only" in table
    assert len(markdown([*others, *goals], "Some card", dry=False, most=50_000)) > 10_000


def test_rows_of_a_section_that_was_ended_are_kept(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    assert file.read() == []
    rows = [Row("s", "first", 1.0, details={"n": [1, 2]}), failed("s", "second", "why")]
    for row in rows:
        file.add(row)
    with file.path.open("a") as cut_off:
        cut_off.write('{"section": "s", "item": "thi')
    assert file.read() == rows


def test_busy_time_counts_overlapping_work_once() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 100, "dur": 50},
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 120, "dur": 10},
        {"ph": "X", "cat": "gpu_memcpy", "name": "c", "ts": 140, "dur": 20},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 180, "dur": 20},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0, "dur": 1000},
        {"ph": "i", "cat": "kernel", "name": "no interval", "ts": 500},
    ]
    busy = read_busy(events, DEVICE_KINDS)
    assert busy.pieces == 4
    assert busy.span_s == pytest.approx(100e-6)
    assert busy.busy_s == pytest.approx(80e-6)
    assert busy.idle_share == pytest.approx(0.2)
    assert busy.slowest["a"] == pytest.approx(70e-6)
    with pytest.raises(ValueError, match="no work"):
        read_busy(events[4:], DEVICE_KINDS)
