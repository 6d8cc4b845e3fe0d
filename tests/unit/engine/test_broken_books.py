"""A page with two accounts stops the engine within one step and is named. A page with none is named, and costs no
turn. Every request is answered."""

from __future__ import annotations

import re

import pytest

from cache.pages import BooksError
from engine.api import EngineStopped, FinishReason
from engine.settings import BooksCheck
from tests.unit.cache.planted_faults import FaultKind, plant
from tests.unit.engine.driver import VOCAB, request
from tests.unit.engine.engine_rig import WAIT_S, Rig
from tests.unit.engine.null_runner import null_generate

FOUND: list[tuple[FaultKind, BooksCheck]] = [
    ("leak", "strict"),
    ("double free", "balance"),
    ("double free", "strict"),
    ("double count", "strict"),
]


def talked(books: BooksCheck) -> Rig:
    rig = Rig(books=books)
    rig.engine.start()
    for name in ("other", "s"):
        rig.generate(request(f"{name}/1", range(1, 8), 5, session_id=name))
    return rig


@pytest.mark.parametrize(("kind", "books"), FOUND)
def test_a_fault_stops_the_engine_at_the_next_step_and_is_named(kind: FaultKind, books: BooksCheck) -> None:
    rig = talked(books)
    rig.hold()
    rig.submit(request("running", [1, 2], 200))
    rig.wait_held()
    page = rig.engine._call(lambda: plant(rig.engine._cache, kind, "s"))
    rig.submit(request("next", [3, 4], 200), request("turn", [5], 3, session_id="fresh"))
    steps = rig.engine._counters.steps
    rig.go_on()
    for outcome in rig.wait("running", "next", "turn"):
        assert outcome.reason is FinishReason.ERROR
        assert outcome.finish is not None
        assert isinstance(outcome.finish.error, EngineStopped)
        message = outcome.finish.error.message
        assert "BooksError" in message
        assert re.search(rf"page {page.result(WAIT_S)} of pool full is (leaked|doubly accounted)", message)
        assert re.search(r"session s[,)]", message), message
        assert (
            re.search(r"last \w+ by session s, request s/1 \d+\.\d s ago", message) or kind == "double free"
        )
    assert rig.engine._counters.steps <= steps + 2, "the held step and the one that found it"
    rig.engine.stop(WAIT_S)
    assert not rig.engine.alive
    with pytest.raises(EngineStopped):
        rig.engine.submit(request("late", [1]))


def test_a_leak_costs_no_turn_and_is_told_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    """It used to stop the engine before the metrics said anything: every request failed for a page that nobody can
    read, and the alert never fired."""
    rig = talked("balance")
    rig.hold()
    rig.submit(request("running", [1, 2], 200))
    rig.wait_held()
    page = rig.engine._call(lambda: plant(rig.engine._cache, "leak", "s"))
    rig.go_on()
    (outcome,) = rig.wait("running")
    assert outcome.token_ids == null_generate([1, 2], 200, VOCAB)
    rig.wait_for(lambda: rig.engine.stats().pages.leaked == 1)
    (told,) = [message for message in caplog.messages if "do not balance" in message]
    assert f"page {page.result(WAIT_S)} of pool full is leaked; last allocated by session s" in told
    rig.engine.stop(WAIT_S)


def test_balance_goes_on_over_a_double_count_and_the_audit_names_it() -> None:
    """No counter is wrong if the slot keeps KV that it has lent. Strict checks and audits find this."""
    rig = talked("balance")
    page = rig.engine._call(lambda: plant(rig.engine._cache, "double count", "s")).result(WAIT_S)
    assert rig.generate(request("next", [3, 4], 20)).token_ids == null_generate([3, 4], 20, VOCAB)
    report = rig.engine.audit().result(WAIT_S)
    assert not report.clean
    assert page in {finding.page for finding in report.findings}
    assert "session s" in str(report)
    rig.engine.stop(WAIT_S)


def test_with_checks_off_the_engine_serves_on_and_the_audit_still_tells() -> None:
    rig = talked("off")
    page = rig.engine._call(lambda: plant(rig.engine._cache, "leak", "s")).result(WAIT_S)
    assert rig.generate(request("next", [3, 4], 20)).token_ids == null_generate([3, 4], 20, VOCAB)
    report = rig.engine.audit().result(WAIT_S)
    assert [(finding.kind, finding.page) for finding in report.findings] == [("leaked", page)]
    assert f"page {page} of pool full is leaked; last allocated by session s, request s/1" in str(report)
    rig.engine.stop(WAIT_S)


def test_a_double_free_is_refused_where_it_happens() -> None:
    """It is found before any check. The allocator knows its free pages, and the journal knows who freed them first."""
    rig = talked("off")
    page = rig.engine._call(lambda: plant(rig.engine._cache, "double free", "s")).result(WAIT_S)
    error = rig.engine.close_session("s").exception(WAIT_S)
    assert isinstance(error, BooksError)
    assert re.search(
        rf"double free of pages \[{page}\] by session s.*last freed by session s, request s/1", str(error)
    )
    rig.engine.stop(WAIT_S)
