"""`kedge top` on a real HTTP server that speaks the contract of the watch, and what it draws."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner
from watched_server import PAGES, Event, happened, replica, session, state, watched_server

from serving.cli.client.watch import WatchEvent, events_in
from serving.cli.main import app
from serving.cli.top.frame import bar, frame
from serving.cli.top.picture import Picture

AT_S = 1_700_000_000.0
BEGIN: list[Event] = [
    state(AT_S, [replica("a", 100), replica("b", 7)], [session("anna"), session("bob", in_turn=True)]),
    happened(AT_S - 1, "moved", session="anna", replica="b", to="a", detail="uneven load"),
    happened(AT_S, "audit", replica="a", detail="page 7 of pool full is leaked"),
]
NEXT = state(
    AT_S + 2, [replica("a", 160), replica("c", 9)], [session("anna")], sessions={"total": 9, "rows": []}
)
WAIT_S = 20.0


def top(url: str, *options: str, columns: int = 120) -> Result:
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", "TZ": "UTC"}
    return CliRunner().invoke(app, ["top", "--url", url, *options], env=env)


def drawn(
    picture: Picture, height: int | None = None, width: int = 120, trouble: str | None = None
) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(frame(picture, "http://server", height, trouble))
    return [line.rstrip() for line in capture.get().splitlines()]


def picture_of(*events: Event) -> Picture:
    picture = Picture()
    for name, data in events:
        picture.take(WatchEvent(name, data))
    return picture


def test_once_prints_one_picture() -> None:
    with watched_server([*BEGIN, NEXT, happened(AT_S + 3, "closed")]) as server:
        result = top(server.url, "--once", "--interval", "0.5")
    assert result.exit_code == 0, result.output
    assert server.asked == ["0.5"]
    lines = result.output.splitlines()
    assert "kedge-chat" in lines[0]
    assert "2 replicas" in lines[0]
    assert "9 sessions  30 tok/s" in lines[0]
    (row,) = (line for line in lines if line.startswith("a "))
    assert row.split()[-8:] == ["40%", "3", "1", "30", "300", "25%", "off", "7"]
    (new,) = (line for line in lines if line.startswith("c "))
    assert new.split()[-5:-3] == ["-", "-"], "what came since has no rates yet"
    assert any("moved" in line and "anna" in line and "b → a" in line for line in lines)
    assert any("page 7 of pool full is leaked" in line for line in lines)
    assert not any("closed" in line for line in lines)


def test_without_a_terminal_it_prints_one_picture_and_ends() -> None:
    """`kedge top | cat` printed nothing."""
    with watched_server([*BEGIN, NEXT]) as server:
        result = top(server.url)
    assert result.exit_code == 0, result.output
    assert "9 sessions  30 tok/s" in result.output.splitlines()[0]
    assert "\x1b" not in result.output


def test_for_programs_each_event_is_a_line() -> None:
    with watched_server([*BEGIN, NEXT]) as server:
        result = top(server.url, "--json")
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert told == [{"event": name, **data} for name, data in (*BEGIN, NEXT)]
    assert result.exit_code == 1
    assert "ended the stream" in result.stderr


def test_for_programs_once_is_the_state() -> None:
    with watched_server([happened(AT_S, "opened"), *BEGIN]) as server:
        result = top(server.url, "--json", "--once")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"event": "state", **BEGIN[0][1]}


@pytest.mark.parametrize("options", [(), ("--once",), ("--json",)])
@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_is_one_line(options: tuple[str, ...], status: int) -> None:
    """A wrong path in the URL was told as a server that was too old."""
    with watched_server(refusal=status) as server:
        result = top(server.url, *options)
    assert (result.exit_code, result.stderr) == (1, f"kedge top: {status}: not for you\n")


def test_what_the_stream_ends_with_is_told() -> None:
    failure = ("error", {"error": {"message": "this key counts no more", "code": "operator_only"}})
    with watched_server([BEGIN[0], failure]) as server:
        result = top(server.url, "--once")
    assert (result.exit_code, result.stderr) == (1, "kedge top: this key counts no more\n")


def test_without_a_server_it_says_so() -> None:
    result = top("http://127.0.0.1:9", "--once")
    assert (result.exit_code, "no server at http://127.0.0.1:9" in result.output) == (1, True)


@pytest.mark.parametrize("interval", ["0.1", "61"])
def test_other_intervals_are_refused(interval: str) -> None:
    assert top("http://127.0.0.1:9", "--interval", interval).exit_code == 2


def test_live_it_connects_again_and_ends_at_ctrl_c() -> None:
    """In a terminal of its own, `kedge top` draws, loses the server's stream, draws the next stream and ends."""
    with watched_server(BEGIN, [NEXT], refusal=503) as server:
        process, ours = _in_a_terminal(server.url, "xterm")
        try:
            seen = _until(ours, "503")
        finally:
            process.send_signal(2)
            status = process.wait(WAIT_S)
            os.close(ours)
    assert status == 0
    assert "anna" in seen
    assert "trying again" in seen
    assert "9 sessions" in seen


def test_a_terminal_that_cannot_be_redrawn_gets_one_picture() -> None:
    """It got nothing at all, for as long as one waited."""
    with watched_server([*BEGIN, NEXT]) as server:
        process, ours = _in_a_terminal(server.url, "dumb")
        try:
            assert "9 sessions" in _until(ours, "9 sessions")
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            os.close(ours)


def _in_a_terminal(url: str, kind: str) -> tuple[subprocess.Popen[bytes], int]:
    """`kedge top` in a terminal of its own, and where what it writes is read."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from serving.cli.main import main; main()", "top", "--url", url],
        stdin=its,
        stdout=its,
        stderr=its,
        env=os.environ | {"TERM": kind, "COLUMNS": "120", "LINES": "30"},
        start_new_session=True,
    )
    os.close(its)
    return process, ours


def _until(terminal: int, word: str) -> str:
    """Everything that is written to the terminal until `word` comes."""
    seen, deadline_s = "", time.monotonic() + WAIT_S
    while word not in seen and time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65_536).decode(errors="replace")
    assert word in seen, seen
    return seen


@pytest.mark.parametrize("height", [12, 16, 24, 40])
def test_a_picture_fits_the_terminal(height: int) -> None:
    rows = [session(f"s{number}") for number in range(100)]
    events = [happened(AT_S, "opened", session=f"s{number}") for number in range(50)]
    picture = picture_of(state(AT_S, [replica("a", 1), replica("b", 1)], rows), *events)
    lines = drawn(picture, height)
    assert len(lines) <= height
    assert any("100 sessions, those used last" in line for line in lines)
    assert any(line.startswith("s0 ") for line in lines)
    assert "s49" in lines[-1], "the last event is there"


def test_an_event_of_a_tree_s_request_names_both() -> None:
    event = happened(AT_S, "opened", session="tree", rid="r1", replica="a")
    assert "tree · r1 a" in drawn(picture_of(state(AT_S, [replica("a", 1)], []), event))[-1]


def test_a_pool_more_is_a_line_more() -> None:
    pools = {"full": dict(PAGES), "window": dict(PAGES, leaked=0)}
    lines = drawn(picture_of(state(AT_S, [replica("a", 1, pools=pools)], [])))
    bars = [line for line in lines if "#" in line and "=" in line and "%" in line]
    assert ["!" in line for line in bars] == [True, False]


def test_who_is_not_up_and_why_nothing_comes_is_told() -> None:
    picture = picture_of(state(AT_S, [replica("a", 1, state="draining", pools={})], []))
    lines = drawn(picture, trouble="no answer")
    assert lines[1] == "no answer"
    assert any("draining" in line for line in lines)
    assert drawn(Picture())[0].startswith("kedge top")


def test_a_replica_that_does_not_answer_is_a_line_of_its_own() -> None:
    silent = {"replica": "b", "state": "suspect", "pools": {}, "answers": False}
    states = [
        state(AT_S + at_s, [replica("a", at_s), silent], [], trouble="no controller") for at_s in (0, 1)
    ]
    lines = drawn(picture_of(*states))
    assert lines[1] == "no controller"
    (row,) = (line for line in lines if line.startswith("b "))
    assert row.split()[1:5] == ["suspect", "does", "not", "answer"]


def test_a_terminal_of_80_columns_shortens_the_bar_and_the_sessions_names_only() -> None:
    """Every column was shortened, to headings such as "r…" and "ho…"."""
    picture = picture_of(state(AT_S, [replica("k3f9a2b1", 100)], [session("resp-" + "0123456789" * 4)]))
    lines = drawn(picture, width=80)
    replicas, sessions = (line for line in lines if line.startswith(("replica", "1 session")))
    assert (
        " ".join(replicas.split())
        == "replica state KV pages used run wait tok/s prefill/s host disk sessions"
    )
    assert " ".join(sessions.split()[-5:]) == "epoch tokens KV turns idle"
    assert "".join(lines).count("…") == 1


@pytest.mark.parametrize("width", [60, 70, 80, 100, 140])
def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_figure(width: int) -> None:
    """Headings were cut to "r…", figures to "1,8…", and long tenants took the room of all other columns."""
    rows = [session("resp-" + "0123456789" * 4, tenant="tenant-" * 9, tier="device", tokens=1_234_567)]
    busy = {"state": "draining", "running": 64, "waiting": 1024, "sessions": 99_000}
    states = [state(AT_S + at_s, [replica("k3f9a2b1", 98_765 * at_s, **busy)], rows) for at_s in (0, 1)]
    lines = drawn(picture_of(*states), width=width)
    assert all(len(line) <= width for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("replica"))
    assert "…" not in lines[at] + lines[at + 1]
    assert {"draining", "40%", "64", "1,024"} <= set(lines[at + 1].split())
    named, told = (line for line in lines if line.startswith(("1 session ", "resp-0123")))
    assert {"tokens", "KV", "idle", "tenant"} <= set(named.split())
    assert {"1,234,567", "2.4", "MiB", "2.0", "s"} <= set(told.split())
    assert "tenant-" in told
    assert width < 70 or all(each in lines[0] for each in ("1 replica", "1 session", "98,765 tok/s"))
    assert ("987,650" in lines[at + 1]) == (width >= 80)


def test_into_a_file_no_name_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [session("s" * 200, tenant="t" * 200)]
    with watched_server(
        [state(AT_S, [replica("a", 1)], rows), state(AT_S + 1, [replica("a", 2)], rows)]
    ) as server:
        result = CliRunner().invoke(app, ["top", "--url", server.url])
    (line,) = (line for line in result.output.splitlines() if "s" * 200 in line)
    assert "t" * 200 in line


@pytest.mark.parametrize("width", [1, 10, 24, 100])
def test_a_bar_is_as_long_as_it_is_to_be(width: int) -> None:
    text = bar(PAGES, width).plain
    assert len(text) == width
    if width >= 10:
        assert "!" in text, "one page of a hundred that leaks is to be seen"


def test_full_and_empty_pools() -> None:
    assert bar({"total": 10, "free": 10}, 8).plain == "." * 8
    assert bar({"total": 10, "session": 10, "free": 0}, 8).plain == "=" * 8
    assert bar({"total": 0, "free": 0}, 8).plain == "." * 8


def test_after_the_stream_broke_off_events_are_told_once_and_rates_begin_anew() -> None:
    picture = picture_of(*BEGIN, NEXT)
    picture.begin_again()
    picture.take(WatchEvent(*NEXT))
    assert not picture.events
    picture.begin_again()
    assert picture.state is not None
    assert picture.rates(picture.state["replicas"][0]) is None


@pytest.mark.parametrize(
    ("lines", "events"),
    [
        (["event: state", 'data: {"a": 1}', ""], [("state", {"a": 1})]),
        (["event: state", 'data: {"a":', "data: 1}", ""], [("state", {"a": 1})]),
        ([": alive", "", "event: x", "", 'data: {"a": 1}', "", "data: {"], [("x", {"a": 1})]),
    ],
)
def test_events_are_read_as_servers_send_them(lines: list[str], events: list[tuple[str, Any]]) -> None:
    assert [(event.name, event.data) for event in events_in(lines)] == events


@pytest.mark.parametrize("data", ["[1]", "nonsense"])
def test_what_is_no_event_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(events_in([f"data: {data}", ""]))


def test_pages_whose_size_is_not_known_yet_are_not_nothing() -> None:
    """A session in a turn had 0 bytes of KV, though its pages were there: its owner tells the size after the turn."""
    rows = [session(f"s{pages}", size_bytes=0, kv_pages=pages) for pages in (114, 0)]
    lines = drawn(picture_of(state(AT_S, [replica("a", 1)], rows)))
    sizes = {line.split()[0]: line.split()[4] for line in lines if line.startswith("s")}
    assert sizes == {"s114": "-", "s0": "0"}
