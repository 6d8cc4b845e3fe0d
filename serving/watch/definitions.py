"""Every metric that Kedge serves: name, kind, labels, unit, help, buckets. They are defined only here.

Processes make their prometheus_client objects from these (`serving/watch/registry.py`), `docs/metrics.py` generates
docs/metrics.md from them, and a test compares them with what a running cluster serves.

Every label has few values: routes, states, tiers, replicas, and only the tenants with the most KV. No label contains an
id of a session or request, or anything else that a client chooses freely.
"""

from __future__ import annotations

from types import MappingProxyType

from controllers.cluster_stats import DRAIN_BUCKETS_S, GROUP_BUCKETS, STORE_BUCKETS_S
from serving.watch.metric_definition import Source, counter, gauge, histogram

TTFT_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INTER_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
QUEUE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
REQUEST_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
COMMIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
MOVE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

CONSTANT_LABELS = ("cluster", "model")
"""Labels of every metric, so that clusters can share one Prometheus: `metrics.cluster_name`, and the model's id."""

LABELS = MappingProxyType(
    {
        "cluster": "the setting `metrics.cluster_name`",
        "model": "the name by which clients ask for the model",
        "replica": "the replica that counts, or on which the controller reports",
        "ingress": "the front end that counts",
        "shard": "which of the controllers counts, from `0`; only `0` unless there are more (`controller.shards`)",
        "pool": "`full`, and `window` if the model has sliding-window layers",
        "account": "`free`, `cached`, `protected`, `session`, `in_flight`, `leaked`",
        "tier": "`device`, `host`, `disk`; of demotions also `log`: the KV was dropped and has to be computed again",
        "tenant": "`no tenant` for callers without one; with `metrics.tenant_names`, the eight tenants with the most "
        "KV at the replica; `other tenants` for all others",
        "outcome": "of turns: see [below](#outcomes-of-turns); of conversations: `recognized` or `new`",
        "reason": "`stop`, `length`, `abort`, `error`",
        "kind": "of conversations: `unnamed` or `named` (a session whose client sends the whole conversation); "
        "of orphans: see [below](#orphans)",
        "result": "`clean`, `findings`, `failed` (the engine did not answer)",
        "route": "the path's template, such as `/v1/kedge/sessions/{session_id}`; `other` for unknown paths",
        "method": "`GET`, `POST`, `PUT`, `PATCH`, `DELETE`, `HEAD`, `OPTIONS`, `websocket`, `other`",
        "status": "`1xx` to `5xx`; `left`: the client went away before the answer",
        "operation": "of the session log: `open`, `fork`, `assign`, `touch`, `load`, `notes`, `commit`, `close`, "
        "`close_after`; also `find`, `claim`, `changes` if clusters share the log",
        "state": "of links: `up` or `broken`",
        "cause": "`lost`: the replica was not reached or its engine ended; `refused`: it did not take the call",
    }
)


REPLICA, INGRESS, CONTROLLER, PAGE = Source

MEMORY = (
    gauge(
        REPLICA,
        "kv_pages",
        "pages",
        "KV pages by account. The account leaked should be 0.",
        "pool",
        "account",
    ),
    gauge(REPLICA, "kv_pool_pages", "pages", "KV pages in the pool.", "pool"),
    gauge(
        REPLICA,
        "kv_utilization",
        "ratio",
        "KV memory that turns use or still need, as a share of the pool. Above 1, not all of them fit.",
    ),
    gauge(
        REPLICA,
        "tenant_kv_bytes",
        "bytes",
        "KV of a tenant's sessions and of its turns in flight, without pages that the prefix cache shares.",
        "tenant",
        "tier",
    ),
    gauge(REPLICA, "host_kv_bytes", "bytes", "Host memory that the KV of idle sessions uses."),
    gauge(REPLICA, "host_kv_budget_bytes", "bytes", "Host memory that the KV of idle sessions may use."),
    gauge(REPLICA, "host_sessions", "sessions", "Idle sessions whose KV is in host memory."),
    gauge(REPLICA, "disk_kv_bytes", "bytes", "Disk space that the KV of idle sessions uses."),
    gauge(REPLICA, "disk_kv_budget_bytes", "bytes", "Disk space that the KV of idle sessions may use."),
    gauge(REPLICA, "disk_sessions", "sessions", "Idle sessions whose KV is on disk."),
    counter(REPLICA, "disk_failures", "operations", "Failed writes and reads of KV on disk."),
    counter(REPLICA, "evicted_pages", "pages", "Cached pages dropped to make room.", "pool"),
    counter(
        REPLICA,
        "demotions",
        "sessions",
        "Idle sessions whose KV was moved to host memory or on to disk, or was dropped (tier log).",
        "tier",
    ),
    counter(
        REPLICA,
        "promotions",
        "sessions",
        "Idle sessions whose KV was moved back from host memory or from disk.",
        "tier",
    ),
    counter(
        REPLICA, "retractions", "requests", "Running requests put back into the queue because memory ran out."
    ),
)
ENGINE = (
    gauge(REPLICA, "sessions", "sessions", "Sessions with a slot in the engine."),
    gauge(REPLICA, "requests_running", "requests", "Requests in the running batch."),
    gauge(REPLICA, "requests_waiting", "requests", "Requests waiting for admission."),
    counter(REPLICA, "engine_steps", "steps", "Steps of the engine."),
    gauge(
        REPLICA,
        "engine_step_age_seconds",
        "seconds",
        "Time since the engine's current step began. 0 between steps.",
    ),
    counter(REPLICA, "generated_tokens", "tokens", "Tokens generated."),
    counter(REPLICA, "prefill_tokens", "tokens", "Input tokens computed."),
    counter(REPLICA, "cached_tokens", "tokens", "Input tokens whose KV was cached."),
    counter(REPLICA, "draft_tokens", "tokens", "Draft tokens proposed to the model."),
    counter(REPLICA, "accepted_draft_tokens", "tokens", "Draft tokens that the model accepted."),
)
TURNS = (
    counter(REPLICA, "turns", "turns", "Turns by outcome.", "outcome"),
    counter(REPLICA, "finished_turns", "turns", "Turns that the engine has ended, by reason.", "reason"),
    histogram(
        REPLICA,
        "queue_seconds",
        "seconds",
        "Time from a turn's arrival at the engine to its first step.",
        QUEUE_BUCKETS_S,
    ),
    histogram(
        REPLICA,
        "ttft_seconds",
        "seconds",
        "Time from a turn's arrival at the replica to its first token.",
        TTFT_BUCKETS_S,
    ),
    histogram(
        REPLICA,
        "prefill_seconds",
        "seconds",
        "Time from a turn's first step to its first token.",
        QUEUE_BUCKETS_S,
    ),
    histogram(
        REPLICA, "decode_seconds", "seconds", "Time from a turn's first token to its last.", REQUEST_BUCKETS_S
    ),
    histogram(
        REPLICA,
        "turn_seconds",
        "seconds",
        "Time from a turn's arrival at the replica to its last token.",
        REQUEST_BUCKETS_S,
    ),
    histogram(
        REPLICA,
        "inter_token_seconds",
        "seconds",
        "Time between tokens of one request.",
        INTER_TOKEN_BUCKETS_S,
    ),
    histogram(REPLICA, "prompt_tokens", "tokens", "Input of a turn, including its history.", TOKEN_BUCKETS),
    histogram(REPLICA, "output_tokens", "tokens", "Output of a turn.", TOKEN_BUCKETS),
    gauge(REPLICA, "commits_pending", "turns", "Finished turns that wait for the session log."),
    gauge(REPLICA, "commits_failing", "turns", "Of those, the turns whose commit has failed at least once."),
    counter(
        REPLICA,
        "commit_retries",
        "commits",
        "Commits sent again because the controller or the session log did not answer.",
    ),
    histogram(
        REPLICA,
        "commit_seconds",
        "seconds",
        "Time from the end of a turn's computation until the log has it or the replica gives up, with all retries.",
        COMMIT_BUCKETS_S,
    ),
)
SESSIONS = (
    gauge(REPLICA, "sessions_held", "sessions", "Named sessions whose history the replica holds."),
    gauge(
        REPLICA,
        "unnamed_sessions",
        "sessions",
        "Conversations without a session whose KV is kept in case they continue.",
    ),
    counter(
        REPLICA,
        "conversations",
        "turns",
        "Turns whose client sends the whole conversation, by whether the replica recognized the history.",
        "kind",
        "outcome",
    ),
    counter(
        REPLICA,
        "conversation_prompt_tokens",
        "tokens",
        "Input of turns whose client sends the whole conversation.",
        "kind",
    ),
    counter(
        REPLICA,
        "conversation_cached_tokens",
        "tokens",
        "Input of turns whose client sends the whole conversation, as far as its KV was cached.",
        "kind",
    ),
    histogram(
        REPLICA,
        "session_load_seconds",
        "seconds",
        "Time to load a session's history from the log, for example after a move.",
        MOVE_BUCKETS_S,
    ),
    gauge(
        REPLICA,
        "orphaned_sessions",
        "sessions",
        "Sessions that have KV in the engine, but are unknown to the replica.",
    ),
)
AUDITS = (
    counter(REPLICA, "audits", "audits", "Audits of all pages, by result.", "result"),
    gauge(
        REPLICA,
        "audit_findings",
        "findings",
        "Findings of the last audit: pages that are not in exactly one account, and counters that disagree.",
    ),
    gauge(
        REPLICA,
        "audit_timestamp_seconds",
        "seconds",
        "Unix time at which the last audit ended. 0 if there was none yet.",
    ),
)
LINKS = (
    gauge(REPLICA, "replica_links", "links", "Front ends that are connected to the replica."),
    gauge(INGRESS, "links", "links", "Connections to replicas, by state.", "state"),
    gauge(INGRESS, "link_calls", "calls", "Calls and turns at replicas that have not ended."),
    gauge(INGRESS, "link_unread_bytes", "bytes", "Bytes sent to replicas and not acknowledged yet."),
    counter(
        INGRESS,
        "connection_breaks",
        "connections",
        "Times that the stream of events from a replica broke and had to be opened again.",
    ),
)
HTTP = (
    counter(
        INGRESS,
        "http_requests",
        "requests",
        "Requests that have ended, by route, method and class of the status.",
        "route",
        "method",
        "status",
    ),
    gauge(INGRESS, "http_requests_in_flight", "requests", "Requests in flight, including WebSockets."),
    histogram(
        INGRESS,
        "http_request_seconds",
        "seconds",
        "Time from a request's arrival to the end of its answer, without WebSockets.",
        REQUEST_BUCKETS_S,
        "route",
    ),
    histogram(
        INGRESS,
        "http_ttft_seconds",
        "seconds",
        "Time from a request's arrival to the first event of its stream.",
        TTFT_BUCKETS_S,
        "route",
    ),
)
DISPATCH = (
    counter(
        INGRESS, "failovers", "calls", "Calls sent again: their replica was lost, or refused them.", "cause"
    ),
    counter(INGRESS, "takeovers", "turns", "Turns that another replica continued in mid-stream."),
    histogram(
        INGRESS,
        "takeover_seconds",
        "seconds",
        "Time from the loss of a turn's replica in mid-stream to the turn's next event, from another replica.",
        MOVE_BUCKETS_S,
    ),
    histogram(
        INGRESS,
        "move_seconds",
        "seconds",
        "Delay of a turn whose session had moved: from the former owner's refusal to the new owner's answer.",
        MOVE_BUCKETS_S,
    ),
    counter(
        INGRESS,
        "ownership_lookups",
        "turns",
        "Turns whose owner was not in the front end's cache, so that it asked the controller.",
    ),
    gauge(
        PAGE,
        "replicas_expected",
        "replicas",
        "Replicas that the settings ask for. With autoscaling, the minimum.",
    ),
    gauge(
        PAGE,
        "scrape_missing_replicas",
        "replicas",
        "Replicas that should be on this page and did not answer.",
    ),
    gauge(PAGE, "controller_up", "bool", "1 if all shards of the controller answered this scrape, else 0."),
)
LEDGER = (
    gauge(
        CONTROLLER, "controller_sessions_idle", "sessions", "Sessions in the ledger without a turn in flight."
    ),
    gauge(CONTROLLER, "controller_sessions_in_turn", "sessions", "Sessions with a turn in flight."),
    gauge(
        CONTROLLER,
        "controller_sessions_unowned",
        "sessions",
        "Sessions whose replica is gone, or was not heard since the controller started. If it is gone, they get a new "
        "owner with their next turn.",
    ),
    gauge(CONTROLLER, "controller_session_tokens", "tokens", "Committed tokens of all sessions."),
    gauge(
        CONTROLLER,
        "controller_session_size_bytes",
        "bytes",
        "KV that replicas hold for all sessions. KV that forks share counts once for each fork.",
    ),
    gauge(
        CONTROLLER,
        "controller_orphaned_sessions",
        "sessions",
        "Sessions on which the ledger and a replica disagree.",
        "replica",
        "kind",
    ),
    *(
        counter(CONTROLLER, f"controller_{name}", unit, text)
        for name, unit, text in (
            ("sessions_opened", "sessions", "Sessions opened."),
            ("sessions_forked", "sessions", "Sessions forked from others."),
            ("sessions_closed", "sessions", "Sessions closed."),
            ("sessions_expired", "sessions", "Sessions ended by their idle timeout."),
            ("sessions_claimed", "sessions", "Sessions taken over from other clusters on the same log."),
            ("sessions_taken_over", "sessions", "Sessions that other clusters on the same log took over."),
            ("turns_committed", "turns", "Turns written to the log."),
            ("turns_refused", "turns", "Commits refused, for example because they came from a former owner."),
            ("commits_failed", "turns", "Commits that failed because of the log. Replicas send them again."),
        )
    ),
    counter(CONTROLLER, "ownership_transfers", "sessions", "Sessions that moved to another replica."),
    counter(
        CONTROLLER,
        "ownership_rebalanced",
        "sessions",
        "Sessions that moved from a busy replica to a less busy one.",
    ),
    counter(CONTROLLER, "ownership_drained", "sessions", "Sessions that moved away from a draining replica."),
    counter(
        CONTROLLER,
        "ownership_moved_by_operators",
        "sessions",
        "Sessions that moved because an operator asked for it.",
    ),
    counter(
        CONTROLLER,
        "ownership_unheard_owners",
        "sessions",
        "Sessions that moved because their owner was gone before the controller started, or for over an hour.",
    ),
)
MEMBERS = (
    *(
        gauge(CONTROLLER, f"controller_replicas_{state}", "replicas", text)
        for state, text in (
            ("live", "Replicas in use."),
            ("suspect", "Replicas that a front end could not reach."),
            ("draining", "Replicas that are draining."),
        )
    ),
    gauge(
        CONTROLLER,
        "controller_heartbeat_age_seconds",
        "seconds",
        "Time since a replica was last heard from, for replicas that are not gone.",
        "replica",
    ),
    counter(
        CONTROLLER,
        "controller_replicas_lost",
        "replicas",
        "Replicas that left without a farewell, or whose engine ended or hung.",
    ),
    histogram(
        CONTROLLER,
        "controller_drain_seconds",
        "seconds",
        "Time from the beginning of a replica's drain to its farewell.",
        DRAIN_BUCKETS_S,
    ),
)
LOG = (
    histogram(
        CONTROLLER,
        "controller_store_seconds",
        "seconds",
        "Duration of operations of the session log, including failed ones.",
        STORE_BUCKETS_S,
        "operation",
    ),
    counter(
        CONTROLLER,
        "controller_store_errors",
        "operations",
        "Operations of the session log that failed.",
        "operation",
    ),
    gauge(CONTROLLER, "controller_commits_queued", "turns", "Turns that wait to be written to the log."),
    histogram(
        CONTROLLER,
        "controller_commit_group_turns",
        "turns",
        "Turns written to the log as one group.",
        GROUP_BUCKETS,
    ),
)

GROUPS = MappingProxyType(
    {
        "KV memory": MEMORY,
        "Engine": ENGINE,
        "Turns": TURNS,
        "Sessions and conversations": SESSIONS,
        "Audits": AUDITS,
        "HTTP, as clients see it": HTTP,
        "Front ends and replicas": DISPATCH,
        "Links": LINKS,
        "Ledger": LEDGER,
        "Replicas, as the controller sees them": MEMBERS,
        "Session log": LOG,
    }
)
DEFINITIONS = MappingProxyType({each.name: each for group in GROUPS.values() for each in group})
