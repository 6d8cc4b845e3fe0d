"""The alert rules do what they say (`promtool test rules`), and use only metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from source_tree import ROOT
from test_documents import anchors

from serving.watch.definitions import DEFINITIONS
from serving.watch.metric_definition import Kind

MONITORING = ROOT / "configs" / "monitoring"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_in_the_table_for_operators() -> None:
    listed = re.findall(r"^\| \[(Kedge\w+)\]", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert listed == [rule["alert"] for rule in alerts()]


def test_every_alert_has_a_unit_test() -> None:
    tests = (MONITORING / "alerts_test.yml").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert [name for name in names if f"alertname: {name}\n" not in tests] == []


def test_leaked_pages_page_somebody_after_thirty_seconds() -> None:
    (leak,) = [rule for rule in alerts() if rule["alert"] == "KedgeLeakedPages"]
    assert leak["for"] == "30s"
    assert leak["labels"]["severity"] == "page"
    assert leak["expr"] == 'kedge_kv_pages{account="leaked"} != 0'


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkedge_\w+", re.sub(r'"[^"]*"', "", expression)))


def is_served(name: str) -> bool:
    """Whether the exposition has a series of that name. A counter ends in `_total`; a histogram has three series."""
    if name in {each.shown for each in DEFINITIONS.values() if each.kind is not Kind.HISTOGRAM}:
        return True
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    return base != name and base in DEFINITIONS and DEFINITIONS[base].kind is Kind.HISTOGRAM


def test_alerts_speak_of_metrics_that_are_served() -> None:
    for rule in rules():
        assert metrics_in(rule["expr"]) or "kedge:" in rule["expr"]
        unknown = {name for name in metrics_in(rule["expr"]) if not is_served(name)}
        assert not unknown, f"{rule.get('alert', rule.get('record'))}: {sorted(unknown)}"


def test_every_alert_says_how_bad_it_is_and_has_a_runbook() -> None:
    headings = anchors((ROOT / "docs" / "runbooks.md").read_text())
    for alert in alerts():
        page, _, section = alert["annotations"]["runbook_url"].partition("#")
        assert (page, section) == ("docs/runbooks.md", alert["alert"].lower())
        assert section in headings, f"no runbook for {alert['alert']}"
        assert alert["labels"]["severity"] in {"page", "warning", "info"}


def test_every_rule_keeps_the_cluster_apart() -> None:
    """A sum without the label would let one cluster's traffic hide another cluster's errors."""
    for rule in rules():
        for grouping in re.findall(r"\b(?:sum|max|min|group|count)\b\s*(by \([^)]*\))?", rule["expr"]):
            assert "cluster" in grouping, rule
