"""The audit as JSON: it names the last holder of every finding, and every replica that should have answered."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from cache.audit import AuditReport, Finding, PageAccounts, TierAccounts
from cache.journal import Holder, PageTrace
from controllers.errors import ControllerError, StoreError
from controllers.records import ReplicaStatus
from controllers.session_keys import session_key
from serving.front.cluster_client import ClusterClient
from serving.front.replica_gone import ReplicaGone
from serving.watch.audit_reply import cluster_audit, failed_audit, replica_audit
from serving.wire.calls import AnyCall, Audit
from serving.wire.tree_ids import node_id

HOST = TierAccounts(budget_bytes=10, used_bytes=4, sessions=1)
DISK = TierAccounts(budget_bytes=100, used_bytes=50, sessions=2)
PAGES = PageAccounts(total=10, free=4, cached=2, protected=1, session=1, in_flight=1)


def test_findings_and_mismatches() -> None:
    trace = PageTrace("allocated", Holder("anna", "turn-1"), 2.5)
    findings = (
        Finding("leaked", "full", 7, (), trace),
        Finding("doubly accounted", "window", 3, ("free", "session anna"), None),
    )
    audit = replica_audit(
        "a", AuditReport({"full": PAGES, "window": PAGES}, HOST, DISK, findings, ("cached: 2, not 3",))
    )
    assert audit["clean"] is False
    assert audit["pools"]["window"] == {
        "total": 10,
        "free": 4,
        "cached": 2,
        "protected": 1,
        "session": 1,
        "in_flight": 1,
        "leaked": 1,
    }
    assert audit["host"] == {"budget_bytes": 10, "used_bytes": 4, "sessions": 1}
    assert audit["disk"] == {"budget_bytes": 100, "used_bytes": 50, "sessions": 2}
    leaked, twice = audit["findings"]
    assert leaked == {
        "kind": "leaked",
        "pool": "full",
        "page": 7,
        "accounts": [],
        "last": {"operation": "allocated", "session": "anna", "request": "turn-1", "age_s": 2.5},
    }
    assert (twice["accounts"], twice["last"]) == (["free", "session anna"], None)
    assert audit["mismatches"] == ["cached: 2, not 3"]


def clean(name: str) -> dict[str, Any]:
    return replica_audit(name, AuditReport({"full": PAGES}, HOST, DISK, (), ()))


def test_whoever_did_not_answer_is_named() -> None:
    audit = cluster_audit([clean("b")], {"a", "b"})
    assert audit["clean"] is False
    assert [(each["replica_id"], each["error"]) for each in audit["replicas"]] == [
        ("a", "the replica did not answer"),
        ("b", None),
    ]
    assert cluster_audit([clean("b"), clean("a")], {"a"})["clean"] is True
    assert cluster_audit([clean("b"), failed_audit("a", "the engine is dead")], {"a"})["clean"] is False
    assert cluster_audit([], ())["clean"] is False


def test_sessions_are_told_as_their_clients_know_them() -> None:
    """An operator was told the cluster's own names: a request of a tree had a control character in it."""
    key = session_key("acme", node_id("tree", "node"))
    traces = [PageTrace("freed", holder, 1.0) for holder in (Holder(key, "r"), Holder("anna"), Holder())]
    findings = [
        Finding("doubly accounted", "full", 7, (f"session ({Holder(key)})",), each) for each in traces
    ]
    findings.append(Finding("leaked", "full", 8, (), None))
    books = AuditReport({"full": PAGES}, HOST, DISK, tuple(findings), (f"bytes of session {key}",))
    (audit,) = cluster_audit([replica_audit("a", books)], {"a"})["replicas"]
    lasts = [each["last"] for each in audit["findings"]]
    assert lasts[-1] is None
    assert [(each["session"], each["rid"], each["tenant"], each["request"]) for each in lasts[:-1]] == [
        ("tree", "node", "acme", "r"),
        ("anna", None, "", None),
        (None, None, "", None),
    ]
    assert audit["findings"][0]["accounts"] == ["session (session acme tree, rid node)"]
    assert audit["mismatches"] == ["bytes of session acme tree, rid node"]


class Replicas:
    """The front end knows replica "a". It knows "b" only after `asked` failed calls. A call of "b" takes
    `silence_s`."""

    def __init__(self, asked: float = math.inf, silence_s: float = 0.0) -> None:
        self._asked = asked
        self._silence_s = silence_s
        self.calls: list[str] = []

    async def present(self) -> tuple[str, ...]:
        return ("a",)

    async def call(self, replica_id: str, call: AnyCall) -> Any:
        assert isinstance(call, Audit)
        self.calls.append(replica_id)
        if replica_id == "b":
            await asyncio.sleep(self._silence_s)
            if self._asked:
                self._asked -= 1
                raise ReplicaGone(replica_id)
        return clean(replica_id)


def client_of(replicas: Replicas, controller: Controller, grace_s: float) -> ClusterClient:
    parts: dict[str, Any] = {"replicas": replicas, "controller": controller, "newcomer_grace_s": grace_s}
    unused: dict[str, Any] = dict.fromkeys(
        ("model", "siblings", "owners", "dispatcher", "places", "metrics", "tasks")
    )
    return ClusterClient(settings={}, **parts, **unused)


class Controller:
    def __init__(self, error: ControllerError | None = None) -> None:
        self._error = error

    async def replicas(self) -> list[ReplicaStatus]:
        if self._error is not None:
            raise self._error
        return [ReplicaStatus("a", 1, 1), ReplicaStatus("b", 1, 1)]


@pytest.mark.parametrize("error", [None, StoreError("no answer")])
async def test_the_controller_knows_who_should_have_answered(error: ControllerError | None) -> None:
    client = client_of(Replicas(), Controller(error), grace_s=0.0)
    audit = await client.audit()
    assert audit["clean"] is False
    if error is None:
        assert [each["replica_id"] for each in audit["replicas"]] == ["a", "b"]
    else:
        assert audit["error"] == "who should have answered is not known: no answer"
        assert [each["clean"] for each in audit["replicas"]] == [True]


async def test_a_silent_replica_is_asked_once() -> None:
    """The one call without an answer has taken all the time that a new replica gets."""
    replicas = Replicas(silence_s=0.01)
    audit = await client_of(replicas, Controller(), grace_s=0.01).audit()
    assert sorted(replicas.calls) == ["a", "b"]
    assert [each["clean"] for each in audit["replicas"]] == [True, False]


async def test_a_replica_that_has_just_started_is_waited_for() -> None:
    """The controller knows of a new replica a moment before this ingress's router does."""
    audit = await client_of(Replicas(asked=2), Controller(), grace_s=30.0).audit()
    assert audit["clean"] is True
    assert [each["replica_id"] for each in audit["replicas"]] == ["a", "b"]
