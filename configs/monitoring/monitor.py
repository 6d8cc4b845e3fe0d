"""Prometheus, and Grafana where it is installed, beside a Kedge that runs on this machine. Ctrl-C ends both.

make monitor            or: python3 configs/monitoring/monitor.py --kedge 127.0.0.1:8000

Needs only Python and Debian's package `prometheus`. Both programs listen on loopback only and keep their data in
--data. The rules, the data source and the dashboards are the files beside this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
LOOK_S = 0.1
MISSING = "Prometheus is not installed: `apt-get install prometheus` has it, or put `prometheus` into PATH."
NO_GRAFANA = "Grafana is not installed, so there are no boards"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kedge", type=place, default=f"{HOST}:8000", help="host:port of Kedge")
    parser.add_argument("--prometheus-port", type=int, default=9090)
    parser.add_argument("--grafana-port", type=int, default=3000)
    parser.add_argument("--data", type=Path, default=Path(".kedge/monitoring"))
    chosen = parser.parse_args(arguments)
    prometheus, grafana = shutil.which("prometheus"), grafana_command()
    if prometheus is None:
        sys.stderr.write(f"{MISSING}\n")
        return 1
    data = chosen.data.resolve()
    data.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{chosen.prometheus_port}"
    started = [start_prometheus(prometheus, chosen.kedge, chosen.prometheus_port, data)]
    try:
        if not comes_up(f"{url}/-/ready", started[0]):
            sys.stderr.write(f"Prometheus did not start; {data / 'prometheus.log'} says why.\n")
            return 1
        boards = NO_GRAFANA
        if grafana is not None:
            started.append(start_grafana(grafana, url, chosen.grafana_port, data))
            boards = f"boards at http://{HOST}:{chosen.grafana_port}"
            if not comes_up(f"http://{HOST}:{chosen.grafana_port}/api/health", started[1]):
                boards = f"Grafana did not start; {data / 'grafana.log'} says why"
        sys.stdout.write(
            f"Watching http://{chosen.kedge}: Prometheus at {url}, its alerts at {alerts_page(url)}; {boards}.\n"
        )
        sys.stdout.flush()
        started[0].wait()
        sys.stderr.write(f"Prometheus ended; {data / 'prometheus.log'} says why.\n")
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(STOP_TIMEOUT_S)


def place(text: str) -> str:
    """A host and a port, as Prometheus wants a target. Raises ArgumentTypeError for anything else, such as a URL."""
    host, _, port = text.rpartition(":")
    if not host or "/" in text or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, for example {HOST}:8000")
    return text


def grafana_command() -> list[str] | None:
    """The command of Grafana's server. Newer packages have one command, older ones two."""
    if (found := shutil.which("grafana")) is not None:
        return [found, "server"]
    if (found := shutil.which("grafana-server")) is not None:
        return [found]
    return None


def start_prometheus(command: str, kedge: str, port: int, data: Path) -> subprocess.Popen[bytes]:
    """Starts Prometheus with a copy of prometheus.yml that scrapes `kedge` and refers to the rules in this folder."""
    config = data / "prometheus.yml"
    shipped = (HERE / "prometheus.yml").read_text()
    config.write_text(
        shipped.replace(f"{HOST}:8000", kedge).replace("- alerts.yml", f"- {HERE / 'alerts.yml'}")
    )
    options = (
        f"--config.file={config}",
        f"--storage.tsdb.path={data / 'prometheus'}",
        f"--web.listen-address={HOST}:{port}",
    )
    with (data / "prometheus.log").open("wb") as log:
        return subprocess.Popen([command, *options], stdout=log, stderr=subprocess.STDOUT)


def start_grafana(command: list[str], prometheus_url: str, port: int, data: Path) -> subprocess.Popen[bytes]:
    """Starts Grafana with the provisioning files. Everybody who reaches it on loopback can look without a password."""
    boards = HERE / "grafana" / "dashboards"
    environment = {
        "GF_SERVER_HTTP_ADDR": HOST,
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(data / "grafana"),
        "GF_PATHS_PROVISIONING": str(HERE / "grafana" / "provisioning"),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(boards / "kedge-overview.json"),
        "PROMETHEUS_URL": prometheus_url,
        "KEDGE_BOARDS": str(boards),
    }
    home = next((each for each in ("/usr/share/grafana", "/opt/grafana") if Path(each).is_dir()), None)
    options = [] if home is None else [f"--homepath={home}"]
    with (data / "grafana.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *options], env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
        )


def alerts_page(url: str) -> str:
    """The page with the alerts. Debian's Prometheus has only the older pages, at another address."""
    try:
        with urllib.request.urlopen(f"{url}/alerts", timeout=5.0):
            return f"{url}/alerts"
    except OSError:
        return f"{url}/classic/alerts"


def comes_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the process answers before it ends or the time is up."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(LOOK_S)
    return False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
