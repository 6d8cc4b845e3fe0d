"""A deep audit of the books as JSON: what each replica's audit found, and which replicas did not answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cache.audit import AuditReport, Finding
from serving.watch.engine_figures import pages_by_account


def replica_audit(replica_id: str, report: AuditReport) -> dict[str, Any]:
    """One replica's audit. Pages are counted by account in each pool; a finding is one page with its accounts."""
    pools = {name: {"total": pages.total, **pages_by_account(pages)} for name, pages in report.pools.items()}
    return {
        "replica_id": replica_id,
        "clean": report.clean,
        "pools": pools,
        "host": asdict(report.host),
        "disk": asdict(report.disk),
        "findings": [_finding(finding) for finding in report.findings],
        "mismatches": list(report.mismatches),
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
    """All replicas' audits. `expected` are the replicas that should have answered; `error` says why that is unknown."""
    answered = {answer["replica_id"] for answer in answers}
    missing = [failed_audit(name, "the replica did not answer") for name in sorted(set(expected) - answered)]
    replicas = sorted([*answers, *missing], key=lambda audit: str(audit["replica_id"]))
    clean = error is None and bool(replicas) and all(audit["clean"] for audit in replicas)
    return {"clean": clean, "error": error, "replicas": replicas}


def _finding(finding: Finding) -> dict[str, Any]:
    last = finding.last
    return {
        "kind": finding.kind,
        "pool": finding.pool,
        "page": finding.page,
        "accounts": list(finding.accounts),
        "last": None
        if last is None
        else {
            "operation": last.operation,
            "session": last.holder.session_id,
            "request": last.holder.request_id,
            "age_s": last.age_s,
        },
    }
