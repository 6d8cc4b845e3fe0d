"""A small real server for `kedge top`: it speaks the contract of GET /v1/kedge/watch (docs/api/looking-in.md)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGES = {"total": 100, "free": 40, "cached": 20, "protected": 5, "session": 25, "in_flight": 9, "leaked": 1}
TIER = {"used_bytes": 256, "budget_bytes": 1024, "sessions": 2}


def replica(name: str, generated_tokens: int, **changed: Any) -> dict[str, Any]:
    return {
        "replica": name,
        "state": "up",
        "pools": {"full": dict(PAGES)},
        "page_bytes": 4096,
        "host": dict(TIER),
        "disk": {"used_bytes": 0, "budget_bytes": 0, "sessions": 0},
        "running": 3,
        "waiting": 1,
        "sessions": 7,
        "generated_tokens": generated_tokens,
        "prefill_tokens": 10 * generated_tokens,
        "cached_tokens": 0,
        "steps": 5,
    } | changed


def session(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "session_id": name,
        "replica_id": "a",
        "epoch": 2,
        "tokens": 1234,
        "size_bytes": 2_500_000,
        "turns": 7,
        "idle_s": 2.0,
        "in_turn": False,
        "tenant": "",
        "rid": None,
    } | changed


def state(at_s: float, replicas: list[dict[str, Any]], rows: list[dict[str, Any]], **changed: Any) -> Event:
    return (
        "state",
        {
            "at": at_s,
            "model": "kedge-chat",
            "replicas": replicas,
            "sessions": {"total": len(rows), "rows": rows},
        }
        | changed,
    )


def happened(at_s: float, kind: str, **changed: Any) -> Event:
    return "event", {
        "at": at_s,
        "kind": kind,
        "session": None,
        "replica": None,
        "to": None,
        "detail": "",
    } | changed


Event = tuple[str, dict[str, Any]]


class WatchedServer:
    """Each call gets the next stream of `rounds`. Then the server refuses. Each stream breaks off at its end. `asked`
    are the intervals that the calls asked for."""

    def __init__(self, rounds: Sequence[Sequence[Event]], refusal: int) -> None:
        self.rounds = list(rounds)
        self.refusal = refusal
        self.asked: list[str] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = urlsplit(request.path)
        if asked.path != "/v1/kedge/watch" or not self.rounds:
            body = json.dumps({"error": {"message": "not for you"}}).encode()
            request.send_response(self.refusal)
            request.send_header("content-length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        self.asked += parse_qs(asked.query)["interval_s"]
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        request.wfile.write(b": sign of life\n\n")
        for name, data in self.rounds.pop(0):
            request.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())


@contextmanager
def watched_server(*rounds: Sequence[Event], refusal: int = 404) -> Iterator[WatchedServer]:
    watched = WatchedServer(rounds, refusal)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):
                # A client may have seen enough before the stream's end.
                watched.answer(self)

        def log_message(self, *_args: object) -> None:
            """Keeps the log out of the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    watched.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield watched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
