"""The dashboard of failures: failed turns and requests, replicas and the controller, the session log."""

from __future__ import annotations

from panels import (
    NO_DEATHS,
    NO_DRAINS,
    NO_ERRORS,
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

LOST_BY_SHARD = rate("kedge_controller_replicas_lost_total", "@c", "shard")
"""Each shard of the controller counts the same losses."""

FAILURES = Board(
    "kedge-failures",
    "Kedge / Failures",
    (
        Row(
            "Turns and requests",
            (
                Panel(
                    "Turns by outcome",
                    "Turns per second. The server's faults are error, unavailable, store_failed and stale.",
                    "ops",
                    (Query(rate("kedge_turns_total", "@r", "outcome"), "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Requests by route and status",
                    "Requests per second that did not get a 2xx status.",
                    "reqps",
                    (
                        Query(
                            rate("kedge_http_requests_total", '@c, status!="2xx"', "route, status"),
                            "{{route}} {{status}}",
                            NO_ERRORS,
                        ),
                    ),
                ),
                Panel(
                    "First-token objective",
                    "Share of streams that wait more than 2 s for their first event. The objective is 1 %.",
                    SHARE,
                    (
                        Query("kedge:ttft_slow:ratio5m{@c}", "5 minutes", NO_STREAMS),
                        Query("kedge:ttft_slow:ratio1h{@c}", "an hour", NO_STREAMS),
                        Query("kedge:ttft_slow:ratio6h{@c}", "six hours", NO_STREAMS),
                    ),
                ),
            ),
        ),
        Row(
            "Replicas and the controller",
            (
                Panel(
                    "Replicas by state",
                    "Replicas by state, as the controller sees them.",
                    PLAIN,
                    tuple(
                        Query(f"max by (cluster, model) (kedge_controller_replicas_{state}{{@c}})", state)
                        for state in ("live", "suspect", "draining")
                    ),
                    stacked=True,
                ),
                Panel(
                    "Heartbeats",
                    "Time since each replica was last heard from.",
                    SECONDS,
                    (Query("max by (replica) (kedge_controller_heartbeat_age_seconds{@r})", "{{replica}}"),),
                ),
                Panel(
                    "Lost replicas, failovers, takeovers",
                    "Events per second.",
                    "ops",
                    (
                        Query(f"max by (cluster, model) ({LOST_BY_SHARD})", "lost replicas"),
                        Query(rate("kedge_failovers_total", "@c", "cause"), "failovers: {{cause}}"),
                        Query(rate("kedge_takeovers_total", "@c"), "takeovers"),
                        Query(rate("kedge_connection_breaks_total", "@c"), "broken connections"),
                    ),
                ),
                quantiles(
                    "Delay of a turn by a takeover",
                    "Time from the loss of the turn's replica to the turn's next event.",
                    "kedge_takeover_seconds",
                    "@c",
                    rarely=NO_DEATHS,
                ),
                quantiles(
                    "Drains",
                    "Time from the beginning of a replica's drain to its farewell.",
                    "kedge_controller_drain_seconds",
                    "@c",
                    rarely=NO_DRAINS,
                ),
                Panel(
                    "Links",
                    "Connections of front ends to replicas, and calls in flight on them.",
                    PLAIN,
                    (
                        Query("sum by (state) (kedge_links{@c})", "{{state}}"),
                        Query("sum by (cluster, model) (kedge_link_calls{@c})", "calls in flight"),
                    ),
                ),
                Panel(
                    "Metrics page",
                    "Whether the controller answered the scrape, and how many replicas did not.",
                    PLAIN,
                    (
                        Query("max by (cluster, model) (kedge_controller_up{@c})", "controller"),
                        Query(
                            "max by (cluster, model) (kedge_scrape_missing_replicas{@c})", "missing replicas"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Session log",
            (
                Panel(
                    "Operations of the log",
                    "99th percentile of the duration, by operation.",
                    SECONDS,
                    (
                        Query(
                            quantile(0.99, "kedge_controller_store_seconds", "@c", "operation"),
                            "{{operation}}",
                        ),
                    ),
                ),
                Panel(
                    "Failures of the log",
                    "Failed operations per second, by operation.",
                    "ops",
                    (Query(rate("kedge_controller_store_errors_total", "@c", "operation"), "{{operation}}"),),
                ),
                Panel(
                    "Turns that wait for the log",
                    "Finished turns at replicas that the log does not have yet, those of them whose commit has "
                    "failed, and commits sent again.",
                    PLAIN,
                    (
                        Query("sum by (cluster, model) (kedge_commits_pending{@r})", "waiting"),
                        Query("sum by (cluster, model) (kedge_commits_failing{@r})", "failing"),
                        Query(rate("kedge_commit_retries_total"), "retries a second"),
                    ),
                ),
            ),
        ),
    ),
)
