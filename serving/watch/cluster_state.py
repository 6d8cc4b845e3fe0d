"""What watchers of a cluster are sent, as plain data ready for JSON: the state of all replicas, and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cache.slots import KVPlace
from controllers.records import ClusterEvent, ClusterView
from controllers.session_keys import id_in, tenant_in
from serving.watch.engine_figures import PAGE_ACCOUNTS
from serving.wire.tree_ids import tree_and_request

TIER_MOVES = MappingProxyType(
    {
        "demoted": (
            ("demotions_to_host", "to host memory"),
            ("demotions_to_disk", "to disk"),
            ("demotions_to_log", "to the log alone"),
        ),
        "promoted": (("promotions_from_host", "from host memory"), ("promotions_from_disk", "from disk")),
    }
)
COUNTED = ("running", "waiting", "sessions", "generated_tokens", "prefill_tokens", "cached_tokens", "steps")
MOST_FINDINGS = 20
"""Findings of one audit that become events of their own."""
LOG = "log"
"""The tier of a session whose tokens are kept without KV."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment. `replicas` are the figures of those that answered. `places` says by replica where the
    KV of its sessions in `view` is; `rows` are these sessions as the API lists them. `trouble` says why part of this is
    old or missing."""

    at_s: float
    view: ClusterView
    replicas: Sequence[Mapping[str, Any]]
    rows: Sequence[Json] = ()
    places: Mapping[str, Mapping[str, KVPlace]] = field(default_factory=dict)
    trouble: str | None = None


def state_of(look: Look, model: str, limit: int) -> Json:
    """One `state` event, with the most recently used sessions."""
    figures = {each["replica_id"]: each for each in look.replicas}
    states = {name: state for name, state in look.view.states.items() if state != "gone"}
    names = states or dict.fromkeys(figures, "unknown")
    sizes = {name: int(each["page_size"]) for name, each in figures.items()}
    rows = [
        row | _placed(entry.session_id, row, look.places, sizes)
        for entry, row in zip(look.view.recent[:limit], look.rows, strict=False)
    ]
    return {
        "at": look.at_s,
        "model": model,
        "trouble": look.trouble,
        "replicas": [_replica(name, names[name], figures.get(name)) for name in sorted(names)],
        "sessions": {"total": look.view.sessions, "rows": rows},
    }


def told_event(event: ClusterEvent) -> Json:
    """One `event` for an event of the controller."""
    return happened(
        event.at_s,
        event.kind,
        event.session_id,
        event.replica_id,
        to=event.to_replica_id,
        detail=event.detail,
    )


def happened(
    at_s: float,
    kind: str,
    key: str | None,
    replica: str | None,
    *,
    to: str | None = None,
    detail: str = "",
) -> Json:
    """`key`: the session's key, if it happened to one."""
    session, rid = (None, None) if key is None else tree_and_request(id_in(key))
    return {
        "at": at_s,
        "kind": kind,
        "session": session,
        "rid": rid,
        "tenant": "" if key is None else tenant_in(key),
        "replica": replica,
        "to": to,
        "detail": detail,
    }


def tier_moves(at_s: float, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Json]:
    """The demotions and promotions that a replica's counters show since the previous look."""
    for kind, counters in TIER_MOVES.items():
        counts = [(int(now[name]) - int(before[name]), where) for name, where in counters]
        if told := ", ".join(f"{count} {where}" for count, where in counts if count > 0):
            yield happened(at_s, kind, None, now["replica_id"], detail=told)


def leaked_pages(figures: Mapping[str, Any]) -> int:
    """Pages that no account has, or that two have, as far as the books' counters show it. It should be 0."""
    pools = (figures["pages"], figures["window_pages"])
    return sum(abs(int(pages["leaked"])) for pages in pools if pages is not None)


def audit_findings(at_s: float, audit: Mapping[str, Any]) -> list[Json]:
    """The findings of one replica's audit: an event for each page, and for each counter that is wrong."""
    replica = audit["replica_id"]
    found = [_finding(at_s, replica, each) for each in audit["findings"][:MOST_FINDINGS]]
    if (more := len(audit["findings"]) - len(found)) > 0:
        found.append(happened(at_s, "audit", None, replica, detail=f"{more} more pages"))
    wrong = audit["mismatches"][:MOST_FINDINGS]
    return found + [happened(at_s, "audit", None, replica, detail=each) for each in wrong]


def _finding(at_s: float, replica: str, finding: Mapping[str, Any]) -> Json:
    accounts = ", ".join(finding["accounts"]) or "no account has it"
    what = f"page {finding['page']} of pool {finding['pool']} is {finding['kind']}: {accounts}"
    last = finding["last"]
    if last is None:
        return happened(at_s, "audit", None, replica, detail=what)
    of = f", of request {last['request']}" if last["request"] else ""
    return happened(at_s, "audit", last["session"], replica, detail=f"{what}; last: {last['operation']}{of}")


def _replica(name: str, state: str, figures: Mapping[str, Any] | None) -> Json:
    """A replica in the state event. Without `figures` it did not answer."""
    if figures is None:
        return {"replica": name, "state": state, "pools": {}, "answers": False}
    pools = {"full": figures["pages"], "window": figures["window_pages"]}
    return {
        "replica": name,
        "state": state,
        "answers": True,
        "pools": {
            pool: {account: pages[account] for account in ("total", *PAGE_ACCOUNTS)}
            for pool, pages in pools.items()
            if pages is not None
        },
        "page_tokens": figures["page_size"],
        "page_bytes": figures["page_size_bytes"],
        "window_page_bytes": figures["window_page_size_bytes"],
        "host": dict(figures["host"]),
        "disk": dict(figures["disk"]),
        **{name: figures[name] for name in COUNTED},
    }


def _placed(
    key: str, row: Json, places: Mapping[str, Mapping[str, KVPlace]], page_sizes: Mapping[str, int]
) -> Json:
    """Which tier has the session's KV, and for how many tokens and pages; null if not known."""
    replica = row["replica_id"]
    if replica not in places or replica not in page_sizes:
        return {"tier": None, "kv_tokens": None, "kv_pages": None}
    place = places[replica].get(key) or KVPlace(LOG, 0)
    tokens = row["tokens"] if place.tokens is None else place.tokens
    return {"tier": place.tier, "kv_tokens": tokens, "kv_pages": -(-tokens // page_sizes[replica])}
