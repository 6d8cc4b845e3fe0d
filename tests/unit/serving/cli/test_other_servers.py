"""Commands at a server that is not Kedge, and with keys and names that no server takes: one line says what is wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from serving.cli.client.server import ServerError, request_json, server_at
from serving.cli.main import app
from serving.cli.start.ready_line import answer

KEY = "sk-a+b/c="
BENCH = ["bench", "--model", "m", "--sessions", "1", "--turns", "1"]


class Other:
    """Answers every call with the same JSON. `keys` are the authorizations that it was sent."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.keys: list[str | None] = []
        self.url = ""


@contextmanager
def running(told: Any) -> Iterator[Other]:
    other = Other(told)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            other.keys.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"] or 0))
            body = json.dumps(other.told).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        other.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield other
        finally:
            server.shutdown()
            serving.join()


def kedge(url: str, *arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"KEDGE_URL": url, **env}, input="hello\n")


def said(result: Result) -> str:
    """The one line with which it failed."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout.strip()) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("told", [{"name": "another"}, ["another"]])
@pytest.mark.parametrize(
    "command",
    [
        ["audit"],
        ["info"],
        ["drain", "r"],
        ["sessions"],
        ["sessions", "show", "s"],
        ["sessions", "fork", "s"],
        ["sessions", "rewind", "s", "--turn", "0"],
        ["sessions", "move", "s"],
    ],
)
def test_a_server_of_another_kind_is_said_to_be_one(command: list[str], told: Any) -> None:
    """They ended in a traceback: KeyError."""
    with running(told) as other:
        line = said(kedge(other.url, *command))
    assert line.endswith(f"what answers at {other.url} is not Kedge"), line


@pytest.mark.parametrize("command", [["audit"], ["sessions"], ["chat", "--model", "m"], BENCH])
def test_white_space_around_a_key_is_no_part_of_it(command: list[str]) -> None:
    """A key from a file often ends in a newline. The key was printed: "Illegal header value b'Bearer sk-...'"."""
    with running({"replicas": []}) as other:
        result = kedge(other.url, *command, KEDGE_API_KEY=f" {KEY}\r\n")
    assert KEY not in result.output
    assert set(other.keys) == {f"Bearer {KEY}"}


def test_the_ready_line_asks_with_the_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_API_KEY", f"{KEY}\n")
    with running({"replicas": []}) as other:
        assert answer(other.url) == {"replicas": []}
    assert other.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize(
    ("command", "key"),
    [
        *((["audit"], key) for key in (f"{KEY}\n{KEY}", f"{KEY}\x1b", f"{KEY}ö", "\udcff")),
        *((command, f"{KEY}\n{KEY}") for command in (["sessions"], ["chat"], BENCH)),
    ],
)
def test_a_key_that_no_header_can_have_is_not_told(command: list[str], key: str) -> None:
    with running({"name": "another"}) as other:
        results = [
            kedge(other.url, *command, KEDGE_API_KEY=key),
            kedge(other.url, *command, "--api-key", key),
        ]
    for result in results:
        assert said(result).endswith(": --api-key or KEDGE_API_KEY: use visible ASCII characters")
    assert other.keys == []


@pytest.mark.parametrize("tenant", ["a b", "acme\n", "Zoë", "", "t" * 257])
def test_a_tenant_that_nobody_can_be_is_not_told(tenant: str) -> None:
    with running({"name": "another"}) as other:
        line = said(kedge(other.url, "sessions", "--tenant", tenant))
    expected = "--tenant or KEDGE_TENANT: use 1 to 256 visible ASCII characters, no spaces"
    assert line == f"kedge sessions: {expected}"
    assert other.keys == []


@pytest.mark.parametrize(
    ("command", "given_as", "name"),
    [
        *((["chat", "--session"], "--session", name) for name in ("Zoë", "zoe ", "z\x1b[31m", "\udcff")),
        (["sessions", "show"], "SESSION_ID", "zoe "),
        (["sessions", "fork"], "SESSION_ID", "zoe "),
        (["drain"], "REPLICA", "zoe "),
    ],
)
def test_a_name_that_nothing_can_have_is_refused_once(command: list[str], given_as: str, name: str) -> None:
    """`kedge chat --session Zoë` ended in a traceback, and `zoe ` in "no server at …"."""
    with running({"name": "another"}) as other:
        line = said(kedge(other.url, *command, name))
    expected = f"{given_as}: use 1 to 256 visible ASCII characters, no spaces"
    assert line == f"kedge {' '.join(command[:-1] if given_as == '--session' else command)}: {expected}"
    assert other.keys == []


@pytest.mark.parametrize(
    "command", [["chat", "--system", "\udcff", "--model", "m"], ["sessions", "fork", "s", "--as", "\udcff"]]
)
def test_what_is_not_text_is_not_sent(command: list[str]) -> None:
    """The shell passes bytes that are not UTF-8 on so. The commands ended in a traceback: UnicodeEncodeError."""
    with running({"name": "another"}) as other:
        result = kedge(other.url, *command)
    assert result.exit_code == 1
    assert "nothing was sent, because it is not all text" in result.stderr
    assert [line for line in result.stderr.splitlines() if "Traceback" in line] == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8000", "'127.0.0.1:8000' does not begin with http:// or https://"),
        ("localhost:8000", "'localhost:8000' does not begin with http:// or https://"),
        ("http://127.0.0.1:1/v1/", "leave out the /v1 of 'http://127.0.0.1:1/v1/'"),
    ],
)
@pytest.mark.parametrize("command", [["info"], ["chat"], BENCH])
def test_an_address_that_is_written_otherwise_is_no_server_that_is_down(
    command: list[str], url: str, reason: str
) -> None:
    """OpenAI's clients take the address with /v1, which got `404: Not Found`. One without http:// was asked whether its
    server runs."""
    result = CliRunner().invoke(app, [*command, "--url", url], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert result.output.strip() == f"kedge {command[0]}: --url or KEDGE_URL: {reason}"


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_takes_a_call_and_gives_no_answer_is_not_said_to_be_absent(hangs: bool) -> None:
    """It was told as "no server", with the advice to start one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        ending = threading.Thread(target=lambda: listening.accept()[0].close())
        if not hangs:
            ending.start()
        with server_at(url, timeout=0.2) as client, pytest.raises(ServerError) as caught:
            request_json(client, "GET", "/health")
        if not hangs:
            ending.join()
    assert str(caught.value).startswith(f"the server at {url} gave no answer (")
