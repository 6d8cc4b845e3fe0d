"""Checks what the engine holds: each tenant's KV, KV of unknown sessions, and from time to time every page."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from cache.audit import AuditReport
from engine.api import Engine, EngineError
from serving.replica.engine_answers import answered
from serving.settings.record_args import MetricsArgs
from serving.watch.metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 5.0
MOST_TENANTS = 8
NO_TENANT = "no tenant"
OTHER_TENANTS = "other tenants"
"""Neither can be a tenant's name: these have no blanks."""


class KVWatch:
    """Watches the engine's KV. Used on the replica's event loop.

    `known` says whether the replica knows a session. `clock` returns monotonic seconds, `unix_clock` Unix time."""

    def __init__(
        self,
        engine: Engine,
        metrics: ReplicaMetrics,
        known: Callable[[str], bool],
        settings: MetricsArgs,
        *,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._known = known
        self._audit_interval_s = settings.audit_interval_s
        self._most_named = MOST_TENANTS if settings.tenant_names else 0
        self._clock = clock
        self._unix_clock = unix_clock
        self._next_audit_s = clock()
        self._unknown: frozenset[str] = frozenset()

    async def look(self) -> None:
        """To be called every LOOK_INTERVAL_S. EngineWatch handles an engine that does not answer. Here, an audit that
        is due then counts as failed."""
        answers = await self._take_census()
        if self._audit_interval_s is None or self._clock() < self._next_audit_s:
            return
        self._next_audit_s = self._clock() + self._audit_interval_s
        if not answers:
            self._metrics.audited(None, self._unix_clock())
            return
        with suppress(EngineError, TimeoutError):
            await self.audit()

    async def _take_census(self) -> bool:
        """Publishes the KV of each tenant and of unknown sessions. Returns whether the engine has answered."""
        try:
            census = await answered(self._engine.kv_census())
        except (EngineError, TimeoutError):
            return False
        # A session that is being opened or closed is for a moment known on one side only: so two looks must agree.
        unknown = frozenset(session_id for session_id in census.sessions if not self._known(session_id))
        self._metrics.tenant_kv(by_tenant(census.num_bytes, self._most_named), len(unknown & self._unknown))
        self._unknown = unknown
        return True

    async def audit(self) -> AuditReport:
        """Audits all pages. Raises EngineError, and TimeoutError if the engine does not answer."""
        try:
            report = await answered(self._engine.audit())
        except (EngineError, TimeoutError):  # but not one whose caller has left
            self._metrics.audited(None, self._unix_clock())
            raise
        self._metrics.audited(report, self._unix_clock())
        if not report.clean:
            logger.error("the books do not balance: %s", report)
        return report


def by_tenant(
    num_bytes: Mapping[tuple[str, str], int], most_named: int = MOST_TENANTS
) -> dict[tuple[str, str], int]:
    """Bytes by tenant and tier: the `most_named` tenants with the most KV, requests without a tenant, and all others.

    `num_bytes` is by namespace and tier. A namespace is a tenant, followed by NUL and a salt if the request has one."""
    tenants: Counter[str] = Counter()
    for (namespace, _), count in num_bytes.items():
        tenants[_tenant(namespace)] += count
    tenants.pop(NO_TENANT, None)
    shown = {NO_TENANT, *_most(tenants.items(), most_named)}
    told: Counter[tuple[str, str]] = Counter()
    for (namespace, tier), count in num_bytes.items():
        tenant = _tenant(namespace)
        told[tenant if tenant in shown else OTHER_TENANTS, tier] += count
    return dict(told)


def _most(tenants: Iterable[tuple[str, int]], count: int) -> list[str]:
    return [tenant for tenant, _ in sorted(tenants, key=lambda each: (-each[1], each[0]))[:count]]


def _tenant(namespace: str) -> str:
    return namespace.partition("\0")[0] or NO_TENANT
