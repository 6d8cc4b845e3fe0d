"""A run's figures as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from serving.cli.load.machine import CpuShares
from serving.cli.load.sample import LoadResult, TurnSample
from serving.cli.load.settings import LoadSettings
from serving.cli.load.summary import Limits, Spread, Summary


def table(settings: LoadSettings, summary: Summary, cpu: CpuShares | None) -> Table:
    """Two columns of facts; times in milliseconds."""
    view = Table(
        title=(
            f"{settings.model}: {settings.sessions} sessions × {settings.turns} turns, "
            f"{settings.input_tokens} in + {settings.output_tokens} out, "
            f"{settings.concurrency} at a time, {settings.mode}, {settings.endpoint}"
        ),
        title_justify="left",
        show_header=False,
    )
    view.add_column()
    view.add_column()
    for name, values in summary.ttft.items():
        view.add_row(f"TTFT {name}", _milliseconds(values))
    view.add_section()
    for name, value in (*_token_rows(summary), *_trust_rows(summary, cpu)):
        view.add_row(name, value)
    return view


def _token_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.chunk_gap is not None:
        yield "between chunks", _milliseconds(summary.chunk_gap)
    if summary.time_per_token is not None:
        yield "per token, mean of a turn", _milliseconds(summary.time_per_token)
    yield "tokens per chunk", f"{summary.tokens_per_chunk:.2f}"
    yield "output tokens/s", f"{summary.output_tokens_per_s:,.1f}"
    if summary.total_tokens_per_s is not None:
        yield "prompt + output tokens/s", f"{summary.total_tokens_per_s:,.1f}"
    if summary.new_prompt_tokens_per_turn is not None:
        yield "new prompt tokens per turn", f"{summary.new_prompt_tokens_per_turn:.1f}"
    if summary.cached_share is not None:
        yield "cached share of prompt", f"{summary.cached_share:.1%}"


def _trust_rows(summary: Summary, cpu: CpuShares | None) -> Iterator[tuple[str, str]]:
    yield (
        "turns ok/failed/skipped",
        f"{summary.turns_ok} / {summary.turns_failed} / {summary.turns_skipped}",
    )
    yield "bursts under 50 µs", f"{summary.bursts} ({summary.burst_share:.1%} of gaps)"
    if summary.client_late is not None:
        yield "client late", _milliseconds(summary.client_late)
    if cpu is not None and cpu.other_cores is not None:
        yield (
            "cores: client/server/others",
            (f"{cpu.client_cores:.2f} / {cpu.server_cores:.2f} / {cpu.other_cores:.2f}"),
        )
    elif cpu is not None:
        others = max(cpu.all_cores - cpu.client_cores, 0.0)
        yield "cores: client/all others", f"{cpu.client_cores:.2f} / {others:.2f}"


def document(
    settings: LoadSettings,
    limits: Limits,
    summary: Summary,
    result: LoadResult,
    machine: dict[str, object],
) -> dict[str, Any]:
    """Everything, JSON ready: settings, machine, figures (seconds), and one row per turn."""
    return {
        "settings": asdict(settings),
        "limits": asdict(limits),
        "machine": machine,
        "cpu": asdict(result.cpu) if result.cpu is not None else None,
        "summary": asdict(summary),
        "turns": [_turn_row(sample) for sample in result.samples],
    }


def _turn_row(sample: TurnSample) -> dict[str, Any]:
    row: dict[str, Any] = {"session": sample.session, "turn": sample.turn, "error": sample.error}
    if sample.error is None:
        row |= {
            "ttft_s": sample.ttft_s,
            "duration_s": sample.ended_s - sample.started_s,
            "time_per_token_s": sample.time_per_token_s,
            "chunks": len(sample.token_times_s),
            "output_tokens": sample.output_tokens,
            "prompt_tokens": sample.usage.prompt_tokens if sample.usage else None,
            "cached_tokens": sample.usage.cached_tokens if sample.usage else None,
        }
    return row


def _milliseconds(values: Spread) -> str:
    return f"p50 {values.p50 * 1e3:.2f}  p90 {values.p90 * 1e3:.2f}  p99 {values.p99 * 1e3:.2f} ms"
