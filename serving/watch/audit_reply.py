"""A deep audit of the books as JSON: what each replica's audit found, and which replicas did not answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cache.audit import AuditReport, Finding
from controllers.session_keys import id_in, tenant_in
from serving.watch.engine_figures import pages_by_account
from serving.wire.tree_ids import BEHIND_TREE, tree_and_request


def replica_audit(replica_id: str, report: AuditReport) -> dict[str, Any]:
    """One replica's audit. Pages are counted by account in each pool; a finding is one page with its accounts. It
    names a session by its key."""
    pools = {name: {"total": pages.total, **pages_by_account(pages)} for name, pages in report.pools.items()}
    return {
        "replica_id": replica_id,
        "clean": report.clean,
        "pools": pools,
        "host": asdict(report.host),
        "disk": asdict(report.disk),
        "findings": [_finding(finding) for finding in report.findings],
        "mismatches": _readable(report.mismatches),
        "error": None,
    }


def failed_audit(replica_id: str, reason: str) -> dict[str, Any]:
    """The entry of a replica whose books could not be read, which does not count as clean."""
    return {
        "replica_id": replica_id,
        "clean": False,
        "pools": {},
        "host": None,
        "disk": None,
        "findings": [],
        "mismatches": [],
        "error": reason,
    }


def cluster_audit(
    answers: Sequence[Mapping[str, Any]], expected: Collection[str], error: str | None = None
) -> dict[str, Any]:
    """All replicas' audits, with sessions as their clients know them. `expected` are the replicas that should have
    answered; `error` says why that is unknown."""
    answered = {answer["replica_id"] for answer in answers}
    missing = [failed_audit(name, "the replica did not answer") for name in sorted(set(expected) - answered)]
    replicas = sorted([*map(_told, answers), *missing], key=lambda audit: str(audit["replica_id"]))
    clean = error is None and bool(replicas) and all(audit["clean"] for audit in replicas)
    return {"clean": clean, "error": error, "replicas": replicas}


def _told(audit: Mapping[str, Any]) -> dict[str, Any]:
    findings = [{**finding, "last": _told_trace(finding["last"])} for finding in audit["findings"]]
    return {**audit, "findings": findings}


def _told_trace(last: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if last is None:
        return None
    key = last["session"]
    session, rid = (None, None) if key is None else tree_and_request(id_in(key))
    return {**last, "session": session, "rid": rid, "tenant": "" if key is None else tenant_in(key)}


def _readable(texts: Sequence[str]) -> list[str]:
    """Sentences of the books, which know only keys: a tenant and an id, with a space between them."""
    return [text.replace(BEHIND_TREE, ", rid ") for text in texts]


def _finding(finding: Finding) -> dict[str, Any]:
    last = finding.last
    return {
        "kind": finding.kind,
        "pool": finding.pool,
        "page": finding.page,
        "accounts": _readable(finding.accounts),
        "last": None
        if last is None
        else {
            "operation": last.operation,
            "session": last.holder.session_id,
            "request": last.holder.request_id,
            "age_s": last.age_s,
        },
    }
