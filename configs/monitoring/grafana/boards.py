"""The content of the Grafana dashboards: rows of panels with their queries. `write_boards.py` writes the files."""

from __future__ import annotations

from failures_board import FAILURES
from panels import (
    BYTES,
    NO_ERRORS,
    NO_MOVES,
    NO_STREAMS,
    PLAIN,
    SECONDS,
    SHARE,
    Board,
    Panel,
    Query,
    Row,
    quantile,
    quantiles,
    rate,
)

OVERVIEW = Board(
    "kedge-overview",
    "Kedge / Overview",
    (
        Row(
            "Now",
            (
                Panel(
                    "Replicas in use",
                    "Replicas in use, and replicas that the settings ask for.",
                    PLAIN,
                    (
                        Query("max by (cluster, model) (kedge_controller_replicas_live{@c})", "in use"),
                        Query("max by (cluster, model) (kedge_replicas_expected{@c})", "expected"),
                    ),
                    "stat",
                    6,
                ),
                Panel(
                    "Leaked pages",
                    "Pages in no account, or in two. Anything but 0 is a bug; run `kedge audit`.",
                    PLAIN,
                    (Query('sum by (cluster, model) (abs(kedge_kv_pages{@r, account="leaked"}))', "leaked"),),
                    "stat",
                    6,
                ),
                Panel(
                    "Audit findings",
                    "Findings of the last audit of each replica, in total.",
                    PLAIN,
                    (Query("sum by (cluster, model) (kedge_audit_findings{@r})", "findings"),),
                    "stat",
                    6,
                ),
                Panel(
                    "Firing alerts",
                    "Firing alerts by name.",
                    PLAIN,
                    (
                        Query(
                            'count by (alertname) (ALERTS{alertstate="firing", cluster=~"$cluster"})',
                            "{{alertname}}",
                            NO_ERRORS,
                        ),
                    ),
                    "stat",
                    6,
                ),
            ),
        ),
        Row(
            "As clients see it",
            (
                Panel(
                    "Requests",
                    "Requests per second, by class of the status.",
                    "reqps",
                    (Query(rate("kedge_http_requests_total", "@c", "status"), "{{status}}"),),
                    stacked=True,
                ),
                quantiles(
                    "Time to first event",
                    "Time from a request to the first event of its stream, at the front end.",
                    "kedge_http_ttft_seconds",
                    '@c, route!="/v1/kedge/watch"',
                    rarely=NO_STREAMS,
                ),
                quantiles(
                    "Request duration",
                    "Time from a request to the end of its answer, without probes, scrapes and watchers.",
                    "kedge_http_request_seconds",
                    '@c, route!~"/health|/ping|/metrics|/v1/kedge/watch"',
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens",
                    "Output tokens, computed input tokens, and input tokens whose KV was cached.",
                    "cps",
                    (
                        Query(rate("kedge_generated_tokens_total"), "output"),
                        Query(rate("kedge_prefill_tokens_total"), "input, computed"),
                        Query(rate("kedge_cached_tokens_total"), "input, cached"),
                    ),
                ),
                Panel(
                    "Requests in engines",
                    "Requests in the running batches, and requests waiting for admission.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_requests_running{@r})", "running"),
                        Query("sum by (cluster, model) (kedge_requests_waiting{@r})", "waiting"),
                    ),
                ),
                Panel(
                    "KV that turns need",
                    "KV memory that turns use or still need, as a share of the pool. Above 1, not all of them fit.",
                    SHARE,
                    (Query("max by (cluster, model, replica) (kedge_kv_utilization{@r})", "{{replica}}"),),
                ),
            ),
        ),
    ),
)

MEMORY = Board(
    "kedge-memory",
    "Kedge / KV memory",
    (
        Row(
            "Page accounts",
            (
                Panel(
                    "Pages by account",
                    "The accounts add up to the pool. The account leaked should be 0.",
                    PLAIN,
                    (Query("sum by (pool, account) (kedge_kv_pages{@r})", "{{pool}} {{account}}"),),
                    width=12,
                    stacked=True,
                ),
                Panel(
                    "Free and cached pages",
                    "Pages available at once, as a share of each replica's pool.",
                    SHARE,
                    (
                        Query(
                            'sum by (replica, pool) (kedge_kv_pages{@r, account=~"free|cached"})'
                            " / sum by (replica, pool) (kedge_kv_pool_pages{@r})",
                            "{{replica}} {{pool}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Leaked pages",
                    "Pages in no account, or in two, by replica.",
                    PLAIN,
                    (Query('abs(kedge_kv_pages{@r, account="leaked"})', "{{replica}} {{pool}}"),),
                ),
                Panel(
                    "Retractions and evictions",
                    "Running requests put back into the queue, and cached pages dropped, because memory ran out.",
                    "ops",
                    (
                        Query(rate("kedge_retractions_total"), "retractions"),
                        Query(rate("kedge_evicted_pages_total", by="pool"), "evicted pages ({{pool}})"),
                    ),
                ),
                Panel(
                    "Age of the last audit",
                    "Time since the last audit of each replica.",
                    SECONDS,
                    (Query("time() - (kedge_audit_timestamp_seconds{@r} > 0)", "{{replica}}"),),
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                Panel(
                    "Host memory",
                    "Host memory that the KV of idle sessions uses, and its budget.",
                    BYTES,
                    (
                        Query("sum by (cluster, model) (kedge_host_kv_bytes{@r})", "used"),
                        Query("sum by (cluster, model) (kedge_host_kv_budget_bytes{@r})", "budget"),
                    ),
                ),
                Panel(
                    "Disk",
                    "Disk space that the KV of idle sessions uses, and its budget.",
                    BYTES,
                    (
                        Query("sum by (cluster, model) (kedge_disk_kv_bytes{@r})", "used"),
                        Query("sum by (cluster, model) (kedge_disk_kv_budget_bytes{@r})", "budget"),
                    ),
                ),
                Panel(
                    "Failures of the disk",
                    "Writes and reads per second of the KV of idle sessions that failed.",
                    "ops",
                    (Query(rate("kedge_disk_failures_total"), "failures"),),
                ),
                Panel(
                    "Sessions by tier",
                    "Idle sessions whose KV is in host memory, and those whose KV is on disk.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_host_sessions{@r})", "host"),
                        Query("sum by (cluster, model) (kedge_disk_sessions{@r})", "disk"),
                    ),
                ),
                Panel(
                    "Demotions",
                    "Idle sessions per second whose KV moves to this tier. Tier log: the KV is dropped.",
                    "ops",
                    (Query(rate("kedge_demotions_total", "@r", "tier"), "to {{tier}}"),),
                    width=12,
                ),
                Panel(
                    "Promotions",
                    "Idle sessions per second whose KV moves back from this tier.",
                    "ops",
                    (Query(rate("kedge_promotions_total", "@r", "tier"), "from {{tier}}"),),
                    width=12,
                ),
            ),
        ),
    ),
)

SESSIONS = Board(
    "kedge-sessions",
    "Kedge / Sessions and tenants",
    (
        Row(
            "Sessions",
            (
                Panel(
                    "Sessions in the ledger",
                    "Sessions without an owner get one with their next turn.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_controller_sessions_idle{@c})", "idle"),
                        Query("sum by (cluster, model) (kedge_controller_sessions_in_turn{@c})", "in a turn"),
                        Query("sum by (cluster, model) (kedge_controller_sessions_unowned{@c})", "unowned"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Sessions by replica",
                    "Sessions whose history each replica holds.",
                    PLAIN,
                    (Query("sum by (replica) (kedge_sessions_held{@r})", "{{replica}}"),),
                ),
                Panel(
                    "Opened and ended sessions",
                    "Sessions per second.",
                    "ops",
                    (
                        Query(rate("kedge_controller_sessions_opened_total", "@c"), "opened"),
                        Query(rate("kedge_controller_sessions_forked_total", "@c"), "forked"),
                        Query(rate("kedge_controller_sessions_closed_total", "@c"), "closed"),
                        Query(rate("kedge_controller_sessions_expired_total", "@c"), "expired"),
                    ),
                ),
                Panel(
                    "Moved sessions",
                    "Sessions per second that move to another replica: all, for load, drained, by operators, and those "
                    "whose owner was gone before the controller started.",
                    "ops",
                    (
                        Query(rate("kedge_ownership_transfers_total", "@c"), "all"),
                        Query(rate("kedge_ownership_rebalanced_total", "@c"), "for load"),
                        Query(rate("kedge_ownership_drained_total", "@c"), "drained"),
                        Query(rate("kedge_ownership_moved_by_operators_total", "@c"), "by operators"),
                        Query(rate("kedge_ownership_unheard_owners_total", "@c"), "gone before"),
                    ),
                ),
                quantiles(
                    "Delay of a turn by a move",
                    "Time from the former owner's refusal to the new owner's answer.",
                    "kedge_move_seconds",
                    "@c",
                    rarely=NO_MOVES,
                ),
                Panel(
                    "Orphaned sessions",
                    "Sessions on which the ledger and a replica disagree. See the runbook of KedgeOrphanedSessions.",
                    PLAIN,
                    (
                        Query(
                            "sum by (replica, kind) (kedge_controller_orphaned_sessions{@r})",
                            "{{replica}} {{kind}}",
                        ),
                        Query("sum by (replica) (kedge_orphaned_sessions{@r})", "{{replica}} kv"),
                    ),
                ),
            ),
        ),
        Row(
            "Tenants and conversations",
            (
                Panel(
                    "KV by tenant",
                    "The tenants with the most KV. `-` stands for callers without a tenant.",
                    BYTES,
                    (Query("sum by (tenant, tier) (kedge_tenant_kv_bytes{@r})", "{{tenant}} {{tier}}"),),
                    stacked=True,
                ),
                Panel(
                    "Recognized conversations",
                    "Turns per second whose client sends the whole conversation, by whether it was recognized.",
                    "ops",
                    (
                        Query(
                            rate("kedge_conversations_total", "@r", "kind, outcome"), "{{kind}} {{outcome}}"
                        ),
                    ),
                ),
                Panel(
                    "Cached input",
                    "Share of all input whose KV was cached.",
                    SHARE,
                    (
                        Query(
                            f"{rate('kedge_cached_tokens_total')} / ({rate('kedge_cached_tokens_total')}"
                            f" + {rate('kedge_prefill_tokens_total')})",
                            "of all turns",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

ENGINE = Board(
    "kedge-engine",
    "Kedge / Engine",
    (
        Row(
            "Duration of a turn's parts",
            (
                quantiles(
                    "Queue",
                    "Time from a turn's arrival at the engine to its first step.",
                    "kedge_queue_seconds",
                ),
                quantiles(
                    "Prefill", "Time from a turn's first step to its first token.", "kedge_prefill_seconds"
                ),
                quantiles(
                    "First token",
                    "Time from a turn's arrival at the replica to its first token.",
                    "kedge_ttft_seconds",
                ),
                quantiles(
                    "Between tokens", "Time between tokens of one request.", "kedge_inter_token_seconds"
                ),
                quantiles("Decode", "Time from a turn's first token to its last.", "kedge_decode_seconds"),
                quantiles(
                    "Commit",
                    "Time from the end of a turn's computation until the log has it.",
                    "kedge_commit_seconds",
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Steps",
                    "Engine steps per second, by replica.",
                    "ops",
                    (Query(rate("kedge_engine_steps_total", "@r", "replica"), "{{replica}}"),),
                ),
                Panel(
                    "Age of the current step",
                    "Time since the engine's current step began. If it keeps growing, the engine hangs.",
                    SECONDS,
                    (Query("max by (replica) (kedge_engine_step_age_seconds{@r})", "{{replica}}"),),
                ),
                Panel(
                    "Output tokens",
                    "Output tokens per second, by replica.",
                    "cps",
                    (Query(rate("kedge_generated_tokens_total", "@r", "replica"), "{{replica}}"),),
                ),
                Panel(
                    "Running and waiting",
                    "Requests in each replica's engine.",
                    PLAIN,
                    (
                        Query("sum by (replica) (kedge_requests_running{@r})", "{{replica}} running"),
                        Query("sum by (replica) (kedge_requests_waiting{@r})", "{{replica}} waiting"),
                    ),
                ),
                Panel(
                    "Length of turns",
                    "Median tokens of a turn's input, including its history, and of its output.",
                    PLAIN,
                    (
                        Query(quantile(0.5, "kedge_prompt_tokens"), "input"),
                        Query(quantile(0.5, "kedge_output_tokens"), "output"),
                    ),
                ),
                Panel(
                    "Finish reasons",
                    "Turns per second, by the reason for which they ended.",
                    "ops",
                    (Query(rate("kedge_finished_turns_total", "@r", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Draft tokens",
                    "Draft tokens per second: proposed, and accepted by the model.",
                    "cps",
                    (
                        Query(rate("kedge_draft_tokens_total"), "proposed"),
                        Query(rate("kedge_accepted_draft_tokens_total"), "accepted"),
                    ),
                ),
            ),
        ),
    ),
)

BOARDS = (OVERVIEW, MEMORY, SESSIONS, ENGINE, FAILURES)
