"""Computes a run's figures from its samples."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.cli.load.sample import LoadResult, TurnSample
from serving.cli.load.settings import LoadSettings

BURST_S = 50e-6
"""Chunks closer together were not generated one after the other: the client, or a proxy, read late."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a quantity, in seconds. `count` is the number of values."""

    count: int
    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond which a run's figures cannot be trusted.

    Bursts count against a run if the client was late (99th percentile). Otherwise the server causes them, and its users
    see them too.
    """

    burst_share: float = 0.02
    other_cores: float = 0.1
    client_late_s: float = 0.005


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Rates are tokens per second of wall time over all sessions; shares are 0 to 1."""

    turns_ok: int
    turns_failed: int
    turns_skipped: int
    errors: dict[str, int]
    wall_s: float
    ttft: dict[str, Spread]
    chunk_gap: Spread | None
    time_per_token: Spread | None
    tokens_per_chunk: float
    output_tokens: int
    prompt_tokens: int | None
    new_prompt_tokens_per_turn: float | None
    cached_share: float | None
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    bursts: int
    burst_share: float
    client_late: Spread | None
    notes: tuple[str, ...]
    rejected: tuple[str, ...]


def spread(values: Iterable[float]) -> Spread | None:
    """Percentiles with linear interpolation (numpy's default); None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        return Spread(1, ordered[0], ordered[0], ordered[0], ordered[0])
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    return Spread(len(ordered), cuts[49], cuts[89], cuts[98], statistics.fmean(ordered))


def summarize(settings: LoadSettings, result: LoadResult, limits: Limits | None = None) -> Summary:
    """Figures of the turns without an error; the others are only counted."""
    limits = limits or Limits()
    good = [sample for sample in result.samples if sample.error is None]
    failed = [sample for sample in result.samples if sample.error is not None]
    gaps_s = [gap_s for sample in good for gap_s in sample.gaps_s]
    bursts = sum(gap_s < BURST_S for gap_s in gaps_s)
    burst_share = bursts / len(gaps_s) if gaps_s else 0.0
    client_late = spread(result.lateness_s)
    lumps, starved = _judge_bursts(bursts, burst_share, client_late, limits)
    output_tokens = sum(sample.output_tokens for sample in good)
    chunks = sum(len(sample.token_times_s) for sample in good)
    usages = [sample.usage for sample in good if sample.usage is not None]
    prompt_tokens = sum(usage.prompt_tokens for usage in usages) if usages else None
    new_prompt_tokens = _sent_tokens_per_turn(good)
    return Summary(
        turns_ok=len(good),
        turns_failed=len(failed),
        turns_skipped=settings.sessions * settings.turns - len(result.samples),
        errors=dict(Counter(sample.error or "" for sample in failed).most_common()),
        wall_s=result.wall_s,
        ttft=_ttft_by_bucket(good, settings.turns),
        chunk_gap=spread(gaps_s),
        time_per_token=spread(value for sample in good if (value := sample.time_per_token_s) is not None),
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        new_prompt_tokens_per_turn=new_prompt_tokens,
        cached_share=_cached_share(good),
        output_tokens_per_s=output_tokens / result.wall_s,
        total_tokens_per_s=None if prompt_tokens is None else (prompt_tokens + output_tokens) / result.wall_s,
        bursts=bursts,
        burst_share=burst_share,
        client_late=client_late,
        notes=(*_notes(settings, good, output_tokens, chunks), *lumps),
        rejected=_rejections(result, limits, good, starved),
    )


def turn_buckets(turns: int) -> dict[str, range]:
    """Turn numbers by name. Early and late turns show whether cost grows with history."""
    buckets = {"all turns": range(1, turns + 1), "turn 1": range(1, 2)}
    if turns >= 2:
        buckets[f"turns 2-{min(5, turns)}"] = range(2, min(5, turns) + 1)
    if turns > 5:
        first = max(turns - 4, 6)
        buckets[f"turns {first}-{turns}"] = range(first, turns + 1)
    return buckets


def _ttft_by_bucket(good: Sequence[TurnSample], turns: int) -> dict[str, Spread]:
    spreads = {}
    for name, numbers in turn_buckets(turns).items():
        values = spread(sample.ttft_s for sample in good if sample.turn in numbers)
        if values is not None:
            spreads[name] = values
    return spreads


def _cached_share(good: Sequence[TurnSample]) -> float | None:
    """The cached part of all prompt tokens, over the turns for which the server reports it."""
    known = [
        (sample.usage.cached_tokens, sample.usage.prompt_tokens)
        for sample in good
        if sample.usage is not None and sample.usage.cached_tokens is not None
    ]
    total = sum(prompt for _, prompt in known)
    return sum(cached for cached, _ in known) / total if total else None


def _sent_tokens_per_turn(good: Sequence[TurnSample]) -> float | None:
    """Mean growth of the prompt by a turn's input: the actual length for --input-tokens, template included."""
    by_session: dict[int, int] = {}
    growth = []
    for sample in sorted(good, key=lambda sample: (sample.session, sample.turn)):
        if sample.usage is None:
            return None
        growth.append(sample.usage.prompt_tokens - by_session.get(sample.session, 0))
        by_session[sample.session] = sample.usage.prompt_tokens + sample.usage.completion_tokens
    return statistics.fmean(growth) if growth else None


def _notes(
    settings: LoadSettings, good: Sequence[TurnSample], output_tokens: int, chunks: int
) -> tuple[str, ...]:
    """What a reader must know to interpret the figures."""
    notes = []
    if any(sample.usage is None for sample in good):
        notes.append("the server reports no usage: tokens are counted as chunks")
    if good and all(sample.usage is None or sample.usage.cached_tokens is None for sample in good):
        notes.append("the server does not report cached tokens")
    if chunks and output_tokens / chunks > 1.05:
        notes.append(
            f"{output_tokens / chunks:.1f} tokens come per chunk: the time between chunks is not the time "
            "between tokens; compare 'per token'"
        )
    short = sum(sample.output_tokens < settings.output_tokens for sample in good)
    if short:
        notes.append(f"{short} of {len(good)} turns ended before {settings.output_tokens} output tokens")
    return tuple(notes)


def _judge_bursts(
    bursts: int, burst_share: float, client_late: Spread | None, limits: Limits
) -> tuple[list[str], list[str]]:
    """Many bursts are only noted if the client was on time; they reject the run if it was late or nobody knows."""
    if burst_share <= limits.burst_share:
        return [], []
    found = f"{bursts} bursts ({burst_share:.1%} of gaps are under {BURST_S * 1e6:.0f} µs)"
    if client_late is not None and client_late.p99 <= limits.client_late_s:
        return [f"{found}: the client was on time, so the server sends tokens in lumps"], []
    late = "" if client_late is None else f" and the client was {client_late.p99 * 1e3:.1f} ms late (p99)"
    return [], [f"{found}{late}; try `chrt -f 50 kedge bench`"]


def _rejections(
    result: LoadResult, limits: Limits, good: Sequence[TurnSample], starved: list[str]
) -> tuple[str, ...]:
    reasons = list(starved)
    if not good:
        reasons.append("no turn succeeded")
    other_cores = result.cpu.other_cores if result.cpu is not None else None
    if other_cores is not None and other_cores > limits.other_cores:
        reasons.append(f"other processes used {other_cores:.2f} cores")
    return tuple(reasons)
