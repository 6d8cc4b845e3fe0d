"""One file holds several ranges of seeds. An interrupted run continues as if it had not been interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.simulation.results import ResultFile, Totals
from tests.simulation.run import main


def played(path: Path, *ranges: str, turns: int = 2) -> list[dict[str, Any]]:
    for seeds in ranges:
        main(["--seeds", seeds, "--turns", str(turns), "--out", str(path)])
    without_time: list[dict[str, Any]] = json.loads(path.read_text())
    for each in without_time:
        del each["wall_s"]
        del each["virtual_hours"]  # is rounded for each part
    return without_time


def test_a_run_that_goes_on_gives_one_range(tmp_path: Path) -> None:
    whole = played(tmp_path / "whole.json", "5..9")
    assert whole[0]["runs"] == 4
    assert whole[0]["turns_done"] > 0
    assert played(tmp_path / "parts.json", "5..7", "7..9") == whole


def test_ranges_stand_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    played(path, "5..6", "50..51")
    ranges = played(path, "6..7", turns=3)
    assert [(each["seeds"], each["turns_per_seed"]) for each in ranges] == [
        ([5, 6], 2),
        ([50, 51], 2),
        ([6, 7], 3),
    ]


def test_another_commit_begins_a_range_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    ResultFile(path, 5, 20, "one").write(6, Totals(seeds=1, failed={5: ["wrong"]}), took_s=1.0)
    ResultFile(path, 6, 20, "other").write(7, Totals(seeds=1), took_s=1.0)
    ResultFile(path, 5, 20, "other").write(6, Totals(seeds=1), took_s=1.0)
    ranges = json.loads(path.read_text())
    assert [(each["seeds"], each["commit"]) for each in ranges] == [
        ([5, 6], "one"),
        ([6, 7], "other"),
        ([5, 6], "other"),
    ]
    assert [each["violations"] for each in ranges] == [{"5": ["wrong"]}, {}, {}]


def test_a_cut_off_range_keeps_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    ResultFile(path, 5, 20, "one").write(6, Totals(seeds=1, turns=20, failed={5: ["wrong"]}), took_s=1.0)
    ResultFile(path, 6, 20, "one").write(8, Totals(seeds=2, turns=41), took_s=2.0)
    (only,) = json.loads(path.read_text())
    assert (only["seeds"], only["runs"], only["turns_done"], only["wall_s"]) == ([5, 8], 3, 61, 3.0)
    assert only["violations"] == {"5": ["wrong"]}
