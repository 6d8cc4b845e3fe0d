"""What `kedge serve` should reach when it is ready, and the process beside it that reports this (ready_line.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from serving.cli.start import ready_line

if TYPE_CHECKING:
    from serving.settings.config import AppArgs
    from serving.settings.settings_file import ServeFile

EVERYWHERE = ("0.0.0.0", "::", "")
PROBE_TIMEOUT_S = 1.0
FORK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Expected:
    """`operators_url` is where operators' calls go. `replicas` is how many are asked for at first. `began_s` is
    monotonic time, which is the same for all processes of a machine."""

    url: str
    operators_url: str
    model: str
    replicas: int
    began_s: float
    as_json: bool


def expected_of(file: ServeFile, args: AppArgs, began_s: float, *, as_json: bool) -> Expected:
    """Reads it from a config file and the settings of its first application."""
    url = _url(file.http_host, file.http_port) + file.route_prefix.rstrip("/")
    own_port = args.ingress.operator_port
    return Expected(
        url=url,
        operators_url=url if own_port is None else _url(args.ingress.operator_host, own_port),
        model=args.model.model_id,
        replicas=args.replicas_expected,
        began_s=began_s,
        as_json=as_json,
    )


def answers_already(expected: Expected) -> bool:
    """Whether a server answers before anything was started: a deployment to be replaced, or another server."""
    return ready_line.answer(f"{expected.url}/health", PROBE_TIMEOUT_S) is not None


def say_when_ready(expected: Expected) -> None:
    """Starts the process that waits. This process keeps one end of a pipe, by which the other notices its end. Without
    that process only the line is missing."""
    noticed, _kept = os.pipe()
    what = json.dumps(asdict(expected) | {"server_fd": noticed})
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-I", "-S", ready_line.__file__, what],
            stdin=subprocess.DEVNULL,
            pass_fds=(noticed,),
            timeout=FORK_TIMEOUT_S,
            check=False,
        )
    os.close(noticed)


def _url(host: str, port: int) -> str:
    host = "127.0.0.1" if host in EVERYWHERE else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
