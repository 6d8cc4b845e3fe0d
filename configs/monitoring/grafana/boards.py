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
                    "Of those that there should be.",
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
                    "Pages in no account, or in two. Anything but 0 is a bug: `kedge audit`.",
                    PLAIN,
                    (Query('sum by (cluster, model) (abs(kedge_kv_pages{@r, account="leaked"}))', "leaked"),),
                    "stat",
                    6,
                ),
                Panel(
                    "Audit findings",
                    "What the last audits of all replicas found.",
                    PLAIN,
                    (Query("sum by (cluster, model) (kedge_audit_findings{@r})", "findings"),),
                    "stat",
                    6,
                ),
                Panel(
                    "Alerts that fire",
                    "By name.",
                    PLAIN,
                    (
                        Query(
                            'count by (alertname) (ALERTS{alertstate="firing"})', "{{alertname}}", NO_ERRORS
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
                    "By the class of their status.",
                    "reqps",
                    (Query(rate("kedge_http_requests_total", "@c", "status"), "{{status}}"),),
                    stacked=True,
                ),
                quantiles(
                    "Time to first event",
                    "Of streams, at the front end.",
                    "kedge_http_ttft_seconds",
                    "@c",
                    rarely=NO_STREAMS,
                ),
                quantiles("Time of a request", "Whole answers.", "kedge_http_request_seconds", "@c"),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens",
                    "Made, computed of input, and found in KV.",
                    "cps",
                    (
                        Query(rate("kedge_generated_tokens_total"), "made"),
                        Query(rate("kedge_prefill_tokens_total"), "input, computed"),
                        Query(rate("kedge_cached_tokens_total"), "input, from KV"),
                    ),
                ),
                Panel(
                    "Requests in engines",
                    "In batches, and waiting for admission.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_requests_running{@r})", "running"),
                        Query("sum by (cluster, model) (kedge_requests_waiting{@r})", "waiting"),
                    ),
                ),
                Panel(
                    "KV that turns take and lack",
                    "As a share of the pool; above 1 there is not enough for all.",
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
            "The pools' books",
            (
                Panel(
                    "Pages by account",
                    "All together are the pool; leaked is 0.",
                    PLAIN,
                    (Query("sum by (pool, account) (kedge_kv_pages{@r})", "{{pool}} {{account}}"),),
                    width=12,
                    stacked=True,
                ),
                Panel(
                    "Free and cached pages",
                    "What can be given at once, as a share of each replica's pool.",
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
                    "By replica.",
                    PLAIN,
                    (Query('kedge_kv_pages{@r, account="leaked"}', "{{replica}} {{pool}}"),),
                ),
                Panel(
                    "Retractions and evictions",
                    "Running requests put back for memory; cached pages dropped.",
                    "ops",
                    (
                        Query(rate("kedge_retractions_total"), "retractions"),
                        Query(rate("kedge_evicted_pages_total"), "evicted pages"),
                    ),
                ),
                Panel(
                    "Age of the last audit",
                    "Since each replica's books were walked.",
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
                    "Idle sessions' KV, and what it may take.",
                    BYTES,
                    (
                        Query("sum by (cluster, model) (kedge_host_kv_bytes{@r})", "used"),
                        Query("sum by (cluster, model) (kedge_host_kv_budget_bytes{@r})", "budget"),
                    ),
                ),
                Panel(
                    "Disk",
                    "The same on disk.",
                    BYTES,
                    (
                        Query("sum by (cluster, model) (kedge_disk_kv_bytes{@r})", "used"),
                        Query("sum by (cluster, model) (kedge_disk_kv_budget_bytes{@r})", "budget"),
                        Query(rate("kedge_disk_failures_total"), "failures a second"),
                    ),
                ),
                Panel(
                    "Sessions by tier",
                    "Idle ones whose KV is in host memory, or on disk.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_host_sessions{@r})", "host"),
                        Query("sum by (cluster, model) (kedge_disk_sessions{@r})", "disk"),
                    ),
                ),
                Panel(
                    "KV that gives way",
                    "By where it goes; from the log it is computed anew.",
                    "ops",
                    (Query(rate("kedge_demotions_total", "@r", "tier"), "to {{tier}}"),),
                    width=12,
                ),
                Panel(
                    "KV that comes back",
                    "By where it was.",
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
                    "Unowned ones get an owner with their next turn.",
                    PLAIN,
                    (
                        Query("max by (cluster, model) (kedge_controller_sessions_idle{@c})", "idle"),
                        Query("max by (cluster, model) (kedge_controller_sessions_in_turn{@c})", "in a turn"),
                        Query("max by (cluster, model) (kedge_controller_sessions_unowned{@c})", "unowned"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Sessions by replica",
                    "Whose history each has.",
                    PLAIN,
                    (Query("sum by (replica) (kedge_sessions_held{@r})", "{{replica}}"),),
                ),
                Panel(
                    "Opened and ended",
                    "A second.",
                    "ops",
                    (
                        Query(rate("kedge_controller_sessions_opened_total", "@c"), "opened"),
                        Query(rate("kedge_controller_sessions_forked_total", "@c"), "forked"),
                        Query(rate("kedge_controller_sessions_closed_total", "@c"), "closed"),
                        Query(rate("kedge_controller_sessions_expired_total", "@c"), "expired"),
                    ),
                ),
                Panel(
                    "Sessions that moved",
                    "To another replica: in all, for load, and from one that was to go.",
                    "ops",
                    (
                        Query(rate("kedge_ownership_transfers_total", "@c"), "all"),
                        Query(rate("kedge_ownership_rebalanced_total", "@c"), "for load"),
                        Query(rate("kedge_ownership_drained_total", "@c"), "drained"),
                    ),
                ),
                quantiles(
                    "What a move costs a turn",
                    "The former owner's refusal to the next one's answer.",
                    "kedge_move_seconds",
                    "@c",
                    rarely=NO_MOVES,
                ),
                Panel(
                    "The ledger and replicas disagree",
                    "Sessions, by kind: see the runbook of KedgeOrphanedSessions.",
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
                    "Those that have the most; `-` names none.",
                    BYTES,
                    (Query("sum by (tenant, tier) (kedge_tenant_kv_bytes{@r})", "{{tenant}} {{tier}}"),),
                    stacked=True,
                ),
                Panel(
                    "Whole conversations, recognized",
                    "Of turns whose client sends all of it each time.",
                    "ops",
                    (
                        Query(
                            rate("kedge_conversations_total", "@r", "kind, outcome"), "{{kind}} {{outcome}}"
                        ),
                    ),
                ),
                Panel(
                    "Input that was there",
                    "Share of all input whose KV had not to be computed.",
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
            "A turn's time",
            (
                quantiles("Queue", "Arrival at the engine to its first step.", "kedge_queue_seconds"),
                quantiles("Prefill", "First step to first token.", "kedge_prefill_seconds"),
                quantiles("First token", "Arrival at the replica to first token.", "kedge_ttft_seconds"),
                quantiles("Between tokens", "Of one request.", "kedge_inter_token_seconds"),
                quantiles("Decode", "First token to last.", "kedge_decode_seconds"),
                quantiles("Commit", "The end of computing to the log.", "kedge_commit_seconds"),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Steps",
                    "A second, by replica.",
                    "ops",
                    (Query(rate("kedge_engine_steps_total", "@r", "replica"), "{{replica}}"),),
                ),
                Panel(
                    "Age of the present step",
                    "One that never ends hangs.",
                    SECONDS,
                    (Query("max by (replica) (kedge_engine_step_age_seconds{@r})", "{{replica}}"),),
                ),
                Panel(
                    "Tokens made",
                    "A second, by replica.",
                    "cps",
                    (Query(rate("kedge_generated_tokens_total", "@r", "replica"), "{{replica}}"),),
                ),
                Panel(
                    "Running and waiting",
                    "By replica.",
                    PLAIN,
                    (
                        Query("sum by (replica) (kedge_requests_running{@r})", "{{replica}} running"),
                        Query("sum by (replica) (kedge_requests_waiting{@r})", "{{replica}} waiting"),
                    ),
                ),
                Panel(
                    "Turns' length",
                    "Medians: input with history, and output.",
                    PLAIN,
                    (
                        Query(quantile(0.5, "kedge_prompt_tokens"), "input"),
                        Query(quantile(0.5, "kedge_output_tokens"), "output"),
                    ),
                ),
                Panel(
                    "Why turns end",
                    "A second.",
                    "ops",
                    (Query(rate("kedge_finished_turns_total", "@r", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Drafts",
                    "Tokens proposed, and those that the model agreed with.",
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
