"""The alert rules do what they say (`promtool test rules`), and speak of metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from source_tree import ROOT

from serving.watch.definitions import DEFINITIONS, Definition, Kind

MONITORING = ROOT / "configs" / "monitoring"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


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


def test_every_alert_has_a_unit_test() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    tests = (MONITORING / "alerts_test.yml").read_text()
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert [alert for alert in alerts if f"alertname: {alert}" not in tests] == []


def test_leaked_pages_page_somebody_after_thirty_seconds() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    (leak,) = [r for g in rules["groups"] for r in g["rules"] if r["alert"] == "KedgeLeakedPages"]
    assert leak["for"] == "30s"
    assert leak["labels"]["severity"] == "page"
    assert leak["expr"] == 'kedge_kv_pages{account="leaked"} != 0'


def test_alerts_speak_of_metrics_that_are_defined() -> None:
    served = {name for each in DEFINITIONS.values() for name in _series(each)}
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            for name in re.findall(r"kedge_\w+", rule["expr"]):
                assert name in served, f"{rule['alert']}: {name}"


def _series(definition: Definition) -> list[str]:
    if definition.kind is not Kind.HISTOGRAM:
        return [definition.shown]
    return [f"{definition.name}_{suffix}" for suffix in ("bucket", "count", "sum")]
