"""`kedge chat` against a server over real HTTP."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from serving.cli.main import app
from tests.unit.serving.openai_stub import Stub, running


def chat(stub: Stub, lines: str, *options: str):
    return CliRunner().invoke(app, ["chat", "--url", stub.url, *options], input=lines)


def test_three_turns_of_one_session_send_only_new_messages_and_close_at_the_end():
    with running(Stub()) as stub:
        result = chat(stub, "one two\nthree\nfour five\n", "--system", "be brief")
    assert result.exit_code == 0, result.output
    (session_id,) = set(stub.session_ids)
    assert len(stub.session_ids) == 3
    assert [[message["content"] for message in body["messages"]] for body in stub.bodies] == [
        ["be brief", "one two"],
        ["three"],
        ["four five"],
    ]
    assert stub.closed == [session_id]
    assert result.output.count(" w0 w1 w2 w3") == 3


@pytest.mark.parametrize("ending", ["", "/quit\n"])
def test_a_session_that_was_named_stays_open(ending):
    """Another client may have opened the session and may still use it."""
    with running(Stub()) as stub:
        result = chat(stub, f"one\n{ending}", "--session", "s1")
    assert result.exit_code == 0, result.output
    assert stub.session_ids == ["s1"]
    assert stub.closed == []
    assert "session s1 stays open" in result.output


def test_reset_leaves_a_named_session_open_and_closes_its_own():
    with running(Stub()) as stub:
        chat(stub, "one\n/reset\ntwo\n", "--session", "s1")
    named, ours = stub.session_ids
    assert named == "s1"
    assert stub.closed == [ours]


def test_each_turn_ends_with_its_figures():
    with running(Stub()) as stub:
        result = chat(stub, "one two\nthree\n")
    lines = [line for line in result.output.splitlines() if line.startswith("TTFT")]
    pattern = r"TTFT [\d.]+ ms · {} cached \+ {} new prompt tokens · 4 output tokens · [\d,]+ tok/s · cut off"
    assert re.fullmatch(pattern.format(0, 2), lines[0])
    assert re.fullmatch(pattern.format(6, 1), lines[1])


def test_reset_closes_the_session_and_starts_another_with_the_system_prompt():
    with running(Stub()) as stub:
        result = chat(stub, "one\n/reset\ntwo\n/quit\nnever sent\n", "--system", "be brief")
    assert result.exit_code == 0
    first, second = stub.session_ids
    assert first != second
    assert stub.closed == [first, second]
    assert [len(body["messages"]) for body in stub.bodies] == [2, 2]


def test_help_and_unknown_commands_are_not_sent():
    with running(Stub()) as stub:
        result = chat(stub, "/help\n/frobnicate\n\n")
    assert "/reset" in result.output
    assert "unknown command /frobnicate" in result.output
    assert stub.bodies == []


def test_a_refused_turn_is_reported_as_an_error_and_the_conversation_goes_on():
    with running(Stub(fails_with=409)) as stub:
        result = chat(stub, "one\ntwo\n", "--session", "s1")
    assert result.exit_code == 1
    assert "409: stub says no" not in result.stdout
    assert result.stderr == "kedge chat: 409: stub says no\n" * 2
    assert stub.session_ids == ["s1", "s1"]


def test_a_stream_that_breaks_off_is_reported_and_does_not_commit_the_system_prompt():
    with running(Stub(breaks_off=True)) as stub:
        result = chat(stub, "one\ntwo\n", "--system", "be brief")
    assert "the stream ended before the turn did" in result.output
    assert [len(body["messages"]) for body in stub.bodies] == [2, 2]


@pytest.mark.parametrize("command", ["chat", "sessions", "bench"])
def test_a_server_that_is_down_is_one_line_and_exit_1(command):
    result = CliRunner().invoke(app, [command, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.output.startswith(f"kedge {command}: no server at http://127.0.0.1:9")
    assert len(result.output.splitlines()) == 1


@contextmanager
def in_a_terminal(
    stub: Stub, *options: str, stdout: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs `kedge chat --session s1` in a real terminal. Yields the process and the end of the terminal to read and
    type at. Standard output goes to `stdout` if given."""
    terminal, worker = pty.openpty()
    program = "from serving.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", "--url", stub.url, "--session", "s1", *options],
        stdin=worker,
        stdout=worker if stdout is None else stdout,
        stderr=worker,
        env=os.environ | {"TERM": "dumb", "COLUMNS": "200"},
        start_new_session=True,
    )
    os.close(worker)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_ctrl_c_aborts_the_turn_and_neither_the_chat_nor_the_named_session():
    """Uses a real terminal, because Ctrl-C comes from a terminal."""
    with (
        running(Stub(token_delay_s=0.02, default_tokens=1000)) as stub,
        in_a_terminal(stub) as (process, terminal),
    ):
        rest = read_until(terminal, b"> ")
        os.write(terminal, b"hello\n")
        rest = read_until(terminal, b" w3", rest)
        process.send_signal(signal.SIGINT)
        rest = read_until(terminal, b"stopped; the session stands where it was", rest)
        read_until(terminal, b"> ", rest)
        assert stub.closed == []
        os.write(terminal, b"\x04")
        assert process.wait(timeout=60) == 0
    assert stub.closed == []
    assert stub.aborted == 1


OBEYED = "\x1b]0;title\x07\x1b[2J\x9b31m\x08"
"""Control sequences that would set a terminal's title, clear it, change its colour and move its cursor back."""


def test_a_terminal_gets_nothing_of_a_model_that_it_would_obey():
    with running(Stub(word=f"é\t{OBEYED}")) as stub, in_a_terminal(stub) as (process, terminal):
        rest = read_until(terminal, b"> ")
        os.write(terminal, b"hello\n")
        rest = read_until(terminal, b"hello\r\n", rest)
        said, _, _ = read_past(terminal, b"> ", rest).decode().partition("TTFT")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=60) == 0
    shown = "".join(f" é\t\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffd{number}" for number in range(4))
    assert said.rstrip() == shown


@pytest.mark.parametrize("word", ["\x1b[2J", "a\tb", ":fire:", "x[1:key:]"])
def test_a_program_gets_what_the_model_said(word):
    """Tabs used to become spaces, and words between colons emoji."""
    with running(Stub(word=word)) as stub:
        assert chat(stub, "one\n").output.count(f" {word}") == 4


def test_a_line_that_is_no_utf_8_is_sent_as_far_as_it_is():
    with running(Stub()) as stub:
        result = CliRunner().invoke(app, ["chat", "--url", stub.url], input=b"caf\xe9 noir\n")
    assert result.exit_code == 0, result.output
    assert stub.bodies[0]["messages"][0]["content"] == "caf\ufffd noir"


def test_the_prompt_is_no_part_of_what_a_program_reads():
    with (
        running(Stub()) as stub,
        in_a_terminal(stub, "--json", stdout=subprocess.PIPE) as (process, terminal),
    ):
        rest = read_until(terminal, b"> ")
        os.write(terminal, b"hello\n\x04")
        read_until(terminal, b"stays open", rest)
        assert process.stdout is not None
        (line,) = process.stdout.read().splitlines()
        assert process.wait(timeout=60) == 0
    assert json.loads(line)["text"] == " w0 w1 w2 w3"


def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    result = CliRunner().invoke(app, ["sessions", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.output.startswith("kedge sessions: http://127.0.0.1:9 cannot be called")


def read_until(terminal: int, expected: bytes, seen: bytes = b"") -> bytes:
    """Waits for `expected` and returns what came after it."""
    return read_past(terminal, expected, seen).split(expected, 1)[1]


def read_past(terminal: int, expected: bytes, seen: bytes, timeout_s: float = 60.0) -> bytes:
    """Waits for `expected` and returns everything up to and including the read that contained it."""
    deadline_s = time.monotonic() + timeout_s
    while expected not in seen:
        ready, _, _ = select.select([terminal], [], [], max(deadline_s - time.monotonic(), 0))
        assert ready, f"{expected!r} did not come; seen {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


def test_for_programs_each_turn_is_a_line():
    with running(Stub()) as stub:
        result = chat(stub, "one two\nthree\n", "--session", "s1", "--json")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert first.pop("ttft_s") > 0
    assert first.pop("tokens_per_s") > 0
    assert first == {
        "session_id": "s1",
        "text": " w0 w1 w2 w3",
        "reasoning": None,
        "finish_reason": "length",
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 4,
    }
    assert second["cached_tokens"] == 6
    assert "s1 stays open" in result.stderr


def test_thoughts_are_no_part_of_the_answer():
    """They were glued to it, and `kedge bench` sent them back as what the assistant had said."""
    with running(Stub(thinks_tokens=2)) as stub:
        shown = chat(stub, "one\n").output
        told = json.loads(chat(stub, "one\n", "--json").stdout)
    assert " w0 w1\n w2 w3\nTTFT" in shown
    assert (told["reasoning"], told["text"], told["completion_tokens"]) == (" w0 w1", " w2 w3", 4)


def test_for_programs_a_server_without_figures_has_null():
    with running(Stub(reports_usage=False)) as stub:
        told = json.loads(chat(stub, "one\n", "--json").stdout)
    assert (told["text"], told["prompt_tokens"], told["ttft_s"]) == (" w0 w1 w2 w3", None, None)
