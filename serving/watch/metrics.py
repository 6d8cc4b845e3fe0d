"""What a replica and a front end count. Used only on their event loops; names are those of definitions.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import NamedTuple

from cache.audit import AuditReport
from engine.api import EngineStats, FinishReason
from serving.watch.engine_figures import engine_figures
from serving.watch.registry import NO_LABELS, Figure, MetricSet, ReadFigures

OUTCOMES = (
    "committed",
    "replayed",
    "aborted",
    "moved",
    "refused",
    "overloaded",
    "unavailable",
    "stale",
    "store_failed",
    "error",
)
AUDIT_RESULTS = ("clean", "findings", "failed")
CONVERSATION_KINDS = ("unnamed", "named")


class FailoverCause(StrEnum):
    """Why a call was sent again. LOST: its replica was not reached, or its engine had ended. REFUSED: its replica
    drained or no longer had the session, as in every planned change."""

    LOST = "lost"
    REFUSED = "refused"


class EndedTurn(NamedTuple):
    """How long a turn that the engine has ended took. Times in seconds: `queue_s` until its first step, `prefill_s`
    from there to its first token, `decode_s` from there to its last. None: it has no token, or began elsewhere."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    turn_s: float
    queue_s: float
    decode_s: float | None = None
    ttft_s: float | None = None
    prefill_s: float | None = None


def nothing_told(_turn: EndedTurn) -> None:
    """A `turn_ended` that does nothing."""


class ReplicaMetrics:
    """What one replica counts. `constant` are the labels that all metrics of the cluster have. `turn_ended` is called
    with each turn that the engine has ended."""

    def __init__(
        self,
        replica_id: str,
        stats: Callable[[], EngineStats],
        constant: Mapping[str, str] = NO_LABELS,
        *,
        turn_ended: Callable[[EndedTurn], None] = nothing_told,
    ) -> None:
        self._tell_ended = turn_ended
        made = self._set = MetricSet(replica_id, constant)
        made.read(lambda: engine_figures(stats()))
        made.read(self._tenant_figures)
        self._tenant_kv: Mapping[tuple[str, str], int] = {}
        self._turns = made.counters("kedge_turns", [(each,) for each in OUTCOMES])
        self._finished = made.counters("kedge_finished_turns", [(each.value,) for each in FinishReason])
        self._queue = made.histogram("kedge_queue_seconds")
        self._ttft = made.histogram("kedge_ttft_seconds")
        self._prefill = made.histogram("kedge_prefill_seconds")
        self._decode = made.histogram("kedge_decode_seconds")
        self._turn = made.histogram("kedge_turn_seconds")
        self._inter_token = made.histogram("kedge_inter_token_seconds")
        self._prompt_tokens = made.histogram("kedge_prompt_tokens")
        self._output_tokens = made.histogram("kedge_output_tokens")
        self._commits_pending = made.gauge("kedge_commits_pending")
        self._commits_failing = made.gauge("kedge_commits_failing")
        self._commit_retries = made.counter("kedge_commit_retries")
        self._commit = made.histogram("kedge_commit_seconds")
        self._load = made.histogram("kedge_session_load_seconds")
        kinds = [(kind,) for kind in CONVERSATION_KINDS]
        self._conversations = made.counters(
            "kedge_conversations", [(*kind, outcome) for kind in kinds for outcome in ("recognized", "new")]
        )
        self._conversation_prompts = made.counters("kedge_conversation_prompt_tokens", kinds)
        self._conversation_cached = made.counters("kedge_conversation_cached_tokens", kinds)
        self._orphans = made.gauge("kedge_orphaned_sessions")
        self._audits = made.counters("kedge_audits", [(each,) for each in AUDIT_RESULTS])
        self._findings = made.gauge("kedge_audit_findings")
        self._audited_at = made.gauge("kedge_audit_timestamp_seconds")

    def read(self, figures: ReadFigures) -> None:
        """Adds figures of other parts, which are read when the text is rendered."""
        self._set.read(figures)

    def commit_pending(self) -> AbstractContextManager[None]:
        """A context around the commit of a turn, from the first try to the last."""
        return self._commits_pending.track_inprogress()

    def commit_failing(self) -> AbstractContextManager[None]:
        """A context around the commit of a turn, from the first failure to the end."""
        return self._commits_failing.track_inprogress()

    def commit_retried(self) -> None:
        self._commit_retries.inc()

    def committed(self, after_s: float) -> None:
        self._commit.observe(after_s)

    def session_loaded(self, after_s: float) -> None:
        self._load.observe(after_s)

    def turn_ended(self, outcome: str) -> None:
        """`outcome` is one of OUTCOMES; docs/metrics.md says what each is."""
        self._turns[outcome,].inc()

    def first_token(self, after_s: float, *, queue_s: float, prefill_s: float) -> None:
        """`after_s` is counted from the turn's arrival at the replica. `queue_s` of it was spent in the engine's queue,
        and `prefill_s` in computing."""
        self._ttft.observe(after_s)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def next_tokens(self, count: int, after_s: float) -> None:
        """`count` tokens that arrived together, `after_s` after the previous ones."""
        for _ in range(count):
            self._inter_token.observe(after_s / count)

    def computed(self, turn: EndedTurn) -> None:
        """Counts a turn that the engine has ended."""
        self._finished[turn.reason,].inc()
        self._turn.observe(turn.turn_s)
        self._prompt_tokens.observe(turn.prompt_tokens)
        self._output_tokens.observe(turn.output_tokens)
        if turn.decode_s is not None:
            self._decode.observe(turn.decode_s)
        self._tell_ended(turn)

    def conversation(self, kind: str, turn: EndedTurn, *, recognized: bool) -> None:
        """Counts a turn whose client sent the whole history."""
        self._conversations[kind, "recognized" if recognized else "new"].inc()
        self._conversation_prompts[kind,].inc(turn.prompt_tokens)
        self._conversation_cached[kind,].inc(turn.cached_tokens)

    def audited(self, report: AuditReport | None, unix_s: float) -> None:
        """Counts an audit; `report` is None if the engine did not answer."""
        if report is None:
            self._audits["failed",].inc()
            return
        self._audits["clean" if report.clean else "findings",].inc()
        self._findings.set(len(report.findings) + len(report.mismatches))
        self._audited_at.set(unix_s)

    def tenant_kv(self, num_bytes: Mapping[tuple[str, str], int], orphans: int) -> None:
        """Sets KV bytes by tenant and tier, for few tenants, and the number of sessions with KV that nobody knows."""
        self._tenant_kv = num_bytes
        self._orphans.set(orphans)

    def _tenant_figures(self) -> Iterable[Figure]:
        return [Figure("kedge_tenant_kv_bytes", count, key) for key, count in self._tenant_kv.items()]

    def render(self) -> str:
        return self._set.render()


class IngressMetrics:
    """What one HTTP front end counts."""

    def __init__(self, ingress_id: str, constant: Mapping[str, str] = NO_LABELS) -> None:
        self.ingress_id = ingress_id
        self._constant = constant
        made = self._set = MetricSet(ingress_id, constant)
        self._failovers = made.counters("kedge_failovers", [(each,) for each in FailoverCause])
        self._takeovers = made.counter("kedge_takeovers")
        self._takeover = made.histogram("kedge_takeover_seconds")
        self._move = made.histogram("kedge_move_seconds")
        self._connection_breaks = made.counter("kedge_connection_breaks")
        self._resolves = made.counter("kedge_ownership_lookups")
        self._requests = made.labelled("kedge_http_requests")
        self._in_flight = made.gauge("kedge_http_requests_in_flight")
        self._request = made.histograms("kedge_http_request_seconds")
        self._ttft = made.histograms("kedge_http_ttft_seconds")

    def read(self, figures: ReadFigures) -> None:
        """Adds figures of other parts, which are read when the text is rendered."""
        self._set.read(figures)

    def failed_over(self, cause: FailoverCause) -> None:
        self._failovers[cause,].inc()

    def taken_over(self, after_s: float) -> None:
        self._takeovers.inc()
        self._takeover.observe(after_s)

    def found_moved(self, after_s: float) -> None:
        """A turn's session had moved, and its new owner has begun to answer."""
        self._move.observe(after_s)

    def connection_broke(self) -> None:
        self._connection_breaks.inc()

    def looked_up(self) -> None:
        self._resolves.inc()

    def request_begins(self) -> None:
        """Counts a request as in flight until `request_ended`."""
        self._in_flight.inc()

    def request_ended(self, route: str, method: str, status: str) -> None:
        self._in_flight.dec()
        self._requests.labels(self.ingress_id, route, method, status).inc()

    def answered(self, route: str, after_s: float) -> None:
        self._request.labels(self.ingress_id, route).observe(after_s)

    def first_event(self, route: str, after_s: float) -> None:
        self._ttft.labels(self.ingress_id, route).observe(after_s)

    def render(self) -> str:
        return self._set.render()

    def render_others(self, figures: Sequence[Figure]) -> str:
        """The text of figures from parts that render none themselves, with the labels of the cluster."""
        others = MetricSet("", self._constant)
        others.read(lambda: figures)
        return others.render()
