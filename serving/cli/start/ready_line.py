"""Prints one line when a server answers: `ready_line.py WHAT`, beside `kedge serve`.

WHAT is JSON, see readiness.Expected. The process detaches from its parent, which would never wait for it. It ends after
the line, when `kedge serve` ends (which closes its end of the pipe), or after LONGEST_S.
It uses the standard library only, since it starts with `python -I -S`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

LOOK_EVERY_S = 0.25
CALL_TIMEOUT_S = 5.0
REPLICAS_PATIENCE_S = 10.0
"""Once a replica answers, the line waits this long for the others."""
LONGEST_S = 3600.0


def answer(url: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """The JSON at `url`; None if there is none or an error. It uses no proxy: the server is on this machine."""
    request = urllib.request.Request(url)
    if key := os.environ.get("KEDGE_API_KEY", "").strip():
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=timeout_s
        ) as reply:
            return json.load(reply)
    except (OSError, HTTPException, ValueError):
        return None


def line(expected: dict[str, Any], replicas: int | None, took_s: float) -> str:
    """The line, as text or as JSON. `replicas`: how many answer; None if only an operator's key may know."""
    asked = expected["replicas"]
    if expected["as_json"]:
        told = {"event": "ready", "url": expected["url"], "model": expected["model"]}
        return json.dumps(told | {"replicas": replicas, "replicas_asked": asked, "seconds": round(took_s, 1)})
    count = f"{replicas} of {asked}" if replicas is not None and replicas < asked else f"{replicas or asked}"
    plural = "s" if asked != 1 else ""
    return (
        f"kedge is ready at {expected['url']}: model {expected['model']}, {count} replica{plural},"
        f" after {took_s:.1f} s"
    )


def wait(expected: dict[str, Any], server_fd: int) -> str | None:
    """The line, once the server answers; None if `kedge serve` ended before."""
    deadline_s = time.monotonic() + LONGEST_S
    settled_s: float | None = None
    while time.monotonic() < deadline_s:
        if select.select([server_fd], [], [], LOOK_EVERY_S)[0]:
            return None
        if answer(f"{expected['url']}/health") is None:
            continue
        now_s = time.monotonic()
        settled_s = settled_s or now_s + REPLICAS_PATIENCE_S
        info = answer(f"{expected['operators_url']}/get_server_info")
        replicas = None if info is None else len(info["replicas"])
        if replicas is None or replicas >= expected["replicas"] or now_s > settled_s:
            return line(expected, replicas, now_s - expected["began_s"])
    return None


def main() -> None:
    """Prints to the standard output of `serve run`."""
    expected = json.loads(sys.argv[1])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    said = wait(expected, expected["server_fd"])
    if said is not None:
        sys.stdout.write(said + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
