"""A real Prometheus (Debian's package) watches a live cluster with the project's own rules, at shortened times."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.served_cluster import ROOT, eventually, free_port

MONITORING = ROOT / "configs" / "monitoring"
SCRAPE_S, EVALUATION_S = 1, 0.5
SHORTEST_RANGE_S = 4.0
"""The shortest range in a rule. A rate needs two samples."""
FASTER, LONGEST_FOR_S = 30.0, 5.0
"""At this factor and above no `for` is longer. That alerts wait for long enough is a matter of the rules' unit tests,
alerts_test.yml."""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Alert = dict[str, Any]


def installed() -> bool:
    return shutil.which("prometheus") is not None


def shortened(rules: dict[str, Any], factor: float) -> dict[str, Any]:
    """The rules with each range and each `for` divided by `factor`. A label `hurry` gives the factor, so that several
    copies can be told apart. Thresholds stay: they are shares, or seconds that a client waits."""
    hurry = f"{factor:g}"
    longest_for_s = LONGEST_FOR_S if factor >= FASTER else math.inf

    def less(text: str, shortest_s: float, longest_s: float = math.inf) -> str:
        seconds = float(text[:-1]) * UNITS_S[text[-1]] / factor
        return f"{min(max(seconds, shortest_s), longest_s) * 1000:.0f}ms"

    for group in rules["groups"]:
        group["name"] += f"-{hurry}"
        for rule in group["rules"]:
            expr = re.sub(r"\[(\d+[smhd])\]", lambda m: f"[{less(m[1], SHORTEST_RANGE_S)}]", rule["expr"])
            rule["expr"] = re.sub(r"kedge:\w+:\w+", rf'\g<0>{{hurry="{hurry}"}}', expr)
            rule.setdefault("labels", {})["hurry"] = hurry
            if "for" in rule:
                rule["for"] = less(rule["for"], 0.0, longest_for_s)
    return rules


class Prometheus:
    """A Prometheus with a port and a folder of its own. Whoever makes it writes `config`."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kdprom", dir="/tmp"))
        self.config = self.directory / "prometheus.yml"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it. Returns once a scrape has reached a target."""
        port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0)
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={self.directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        eventually(self._scrapes, 30.0)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10.0)
            self.client.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def read_config_again(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def query(self, expression: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """The samples of an instant query, as the API gives them, at the time `at_s` or now."""
        parameters = {"query": expression} | ({} if at_s is None else {"time": f"{at_s:.3f}"})
        reply = self.client.get("/api/v1/query", params=parameters)
        assert reply.status_code == 200, (expression, reply.text)
        result: list[dict[str, Any]] = reply.json()["data"]["result"]
        return result

    def has_numbers(self, expression: str, at_s: float | None = None) -> bool:
        """Whether the result has a number. A quantile of no observations is NaN."""
        return any(not math.isnan(float(each["value"][1])) for each in self.query(expression, at_s))

    def targets(self) -> list[str]:
        """Each target's address, health, time of the last scrape in seconds, and last error, for error messages."""
        found = self.client.get("/api/v1/targets", params={"state": "active"}).json()["data"]
        return [
            f"{each['scrapeUrl']} {each['health']} {each['lastScrapeDuration']:.2f} s {each['lastError']}"
            for each in found["activeTargets"]
        ]

    def _scrapes(self) -> bool:
        try:
            ready = self.client.get("/-/ready").status_code == 200
            return ready and bool(self.query("up == 1"))
        except httpx.HTTPError:
            return False


class LivePrometheus(Prometheus):
    """Scrapes the front end at `port` every SCRAPE_S, and evaluates the rules in a copy for each of `factors`."""

    def __init__(self, port: int, factors: tuple[float, ...]) -> None:
        super().__init__()
        self._target = f"127.0.0.1:{port}"
        self._targets = self.directory / "targets.json"
        for factor in factors:
            self._write_rules(factor)
        self._configure(SCRAPE_S, EVALUATION_S)
        self.reach()

    def reach(self, there: bool = True) -> None:
        """Sets whether scrapes reach the front end. If not, they go to a port where nothing listens."""
        target = self._target if there else "127.0.0.1:9"
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps([{"targets": [target], "labels": {"instance": "kedge"}}]))
        fresh.replace(self._targets)

    def evaluate_too(self, factor: float) -> None:
        """Evaluates from now on one more copy of the rules."""
        self._write_rules(factor)
        self.read_config_again()

    def scrape_every(self, interval_s: int, evaluation_s: float = EVALUATION_S) -> None:
        """Changes the intervals. A page without the controller takes three seconds, and a scrape may not take longer
        than its interval."""
        self._configure(interval_s, evaluation_s)
        self.read_config_again()

    def firing(self, name: str, **labels: str) -> list[Alert]:
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        wanted = {"alertname": name, **labels}.items()
        return [each for each in alerts if each["state"] == "firing" and wanted <= each["labels"].items()]

    def fires(self, name: str, timeout_s: float = 60.0, **labels: str) -> Alert:
        """Waits until the alert fires with these labels."""
        try:
            found: list[Alert] = eventually(lambda: self.firing(name, **labels), timeout_s, 0.25)
        except AssertionError as error:
            raise AssertionError(f"{name} {labels} does not fire: {self.state(name)}") from error
        return found[0]

    def resolves(self, name: str, timeout_s: float = 60.0, **labels: str) -> None:
        eventually(lambda: not self.firing(name, **labels), timeout_s, 0.25)

    def fired_within(self, time: str, **labels: str) -> set[str]:
        """Names of the alerts that fired at any time within the last `time`."""
        chosen = "".join(f', {name}="{value}"' for name, value in labels.items())
        found = self.query(
            f'group by (alertname) (last_over_time(ALERTS{{alertstate="firing"{chosen}}}[{time}]))'
        )
        return {each["metric"]["alertname"] for each in found}

    def state(self, name: str) -> Any:
        """The state of an alert and the result of its expression, for error messages."""
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"] if rule["name"] == name]
        return [(rule["alerts"], rule["query"], self.query(rule["query"])) for rule in found]

    def _write_rules(self, factor: float) -> None:
        rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
        path = self.directory / f"rules-{factor:g}.yml"
        path.write_text(yaml.safe_dump(shortened(rules, factor)))

    def _configure(self, interval_s: int, evaluation_s: float) -> None:
        shipped = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        (job,) = (each for each in shipped["scrape_configs"] if each["job_name"] == "kedge")
        del job["static_configs"]
        job["file_sd_configs"] = [{"files": [str(self._targets)], "refresh_interval": "1s"}]
        document = {
            "global": {
                "scrape_interval": f"{interval_s}s",
                "scrape_timeout": f"{interval_s}s",
                "evaluation_interval": f"{evaluation_s * 1000:.0f}ms",
            },
            "rule_files": [str(self.directory / "rules-*.yml")],
            "scrape_configs": [job],
        }
        self.config.write_text(yaml.safe_dump(document))
