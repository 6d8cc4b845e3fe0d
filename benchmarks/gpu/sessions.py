"""64 sessions of 20 turns over one shared history. Kedge gets the new tokens. Beside it, transformers' continuous
batching gets the whole history every turn and shares prefixes as it can. Same card, weights and prompts."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import Bench, greedy
from benchmarks.gpu.rows import skipped
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.turns import Event, Figures, Plan, Turn, figures, last_whole_turn, run_load
from cache.token_chain import TokenChain
from engine.api import FinishReason, GenerateRequest, TokenDelta
from engine.engine import LocalEngine
from engine.settings import ExecutionSettings, SchedulerSettings

THROUGHPUT_TARGET = 5.0
TTFT_TARGET = 0.2
KEDGE_SHARE = 0.35
"""Kedge's share of the section's time, at most."""

ROOM = 256
"""Extra tokens a session beside its turns, for pages that are not full and for what the warm-up leaves."""

SETTLE_S = 0.3
"""Time in which an idle engine publishes its counts."""

DRY = Plan(sessions=3, turns=3, shared=40, new=5, out=6)


def run(stage: Stage) -> None:
    options = stage.options
    shape = options.model or ("tiny" if stage.dry else "8b")
    given = {"sessions": options.sessions, "turns": options.turns, "shared": options.shared_tokens}
    plan = replace(DRY if stage.dry else Plan(), **{name: value for name, value in given.items() if value})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, stage.device, Path(folder))
        plan = replace(plan, vocab_size=bench.spec.vocab_size)
        side = Kedge(bench, plan, options.step_tokens)
        ours = stage.attempt("Kedge", partial(kedge_turns, stage, side, plan))
        bench.close()
        if ours:
            others(stage, bench, plan, ours)


def kedge_turns(stage: Stage, side: Kedge, plan: Plan) -> list[Turn]:
    with side.running() as about:
        warm_up(side, plan)
        before = side.counts()
        done = run_load(side, plan, KEDGE_SHARE * stage.left_s)
        counts = {name: count - before[name] for name, count in side.counts().items()}
    name = f"Kedge, steps of {side.step_tokens:,}"
    side_row(stage, name, plan, done, last_whole_turn(done, plan), about)
    stage.row(
        "Kedge: prompt tokens computed", counts["prefill_tokens"], "",
        note=", ".join(f"{name} {count:,}" for name, count in counts.items()), details=counts,
    )  # fmt: skip
    return done


def others(stage: Stage, bench: Bench, plan: Plan, ours: list[Turn]) -> None:
    try:
        from benchmarks.gpu import peer
    except ImportError as error:
        stage.out.add(skipped(stage.section, "transformers' continuous batching", str(error)))
        return
    if stage.options.peers == "none":
        return
    names = [name for name in stage.options.peers.split(",") if name] or peer.ways(stage.device)
    best: tuple[float, str, list[Turn]] | None = None
    for index, way in enumerate(names):
        seconds = stage.left_s / (len(names) - index)
        side = peer.Peer(bench, plan, way)
        try:
            side.prepare()
        except peer.PeerUnavailable as error:
            stage.out.add(skipped(stage.section, f"transformers, {way}", str(error)))
            continue
        found = stage.attempt(way, partial(peer_turns, stage, side, plan, way, seconds)) or []
        bench.close()
        if (last := last_whole_turn(found, plan)) >= 2:
            rate = figures(found, last).tokens_per_s
            best = max(best or (0.0, "", []), (rate, way, found), key=lambda each: each[0])
    if best is None:
        stage.out.add(skipped(stage.section, "comparison", "no side to compare with"))
        return
    compare(stage, plan, ours, best[2], best[1])


def peer_turns(stage: Stage, side: Any, plan: Plan, way: str, seconds: float) -> list[Turn]:
    with side.running() as about:
        warm_up(side, plan)
        done = run_load(side, plan, 0.8 * seconds)
    last = last_whole_turn(done, plan)
    if last < 2:
        stage.out.add(
            skipped(
                stage.section, way, f"{len(done)} turns in {seconds:.0f} s, no second one of all: {about}"
            )
        )
    else:
        side_row(stage, f"transformers, {way}", plan, done, last, about)
    return done


def warm_up(side: Any, plan: Plan) -> None:
    """Compiles kernels and captures graphs; uses other tokens, so that the load shares nothing with it."""
    run_load(side, replace(plan, seed=plan.seed + 1, turns=2, shared=plan.shared // 8, out=4), 90.0)


def side_row(stage: Stage, name: str, plan: Plan, done: list[Turn], last: int, about: str) -> Figures:
    result = figures(done, last)
    stage.row(
        f"{name}: {plan.sessions} sessions, turns 2–{last}", result.tokens_per_s, "tok/s",
        note=f"TTFT {result.ttft_median_s * 1e3:.1f} ms, p95 {result.ttft_p95_s * 1e3:.1f} ms; {about}",
        details={**asdict(result), "plan": asdict(plan), "about": about},
    )  # fmt: skip
    return result


def compare(stage: Stage, plan: Plan, ours: list[Turn], theirs: list[Turn], way: str) -> None:
    """Compares over the turns that both sides ended in all sessions."""
    last = min(last_whole_turn(ours, plan), last_whole_turn(theirs, plan))
    left, right = figures(ours, last), figures(theirs, last)
    note = f"turns 2–{last}, against {way}"
    stage.row(
        "throughput, × transformers", left.tokens_per_s, "tok/s", limit=right.tokens_per_s,
        share=left.tokens_per_s / right.tokens_per_s, target=THROUGHPUT_TARGET, note=note,
        details={"kedge": asdict(left), "transformers": asdict(right)},
    )  # fmt: skip
    for name, a_s, b_s in (
        ("median", left.ttft_median_s, right.ttft_median_s),
        ("p95", left.ttft_p95_s, right.ttft_p95_s),
    ):
        stage.row(
            f"TTFT {name}, × transformers", a_s * 1e3, "ms", limit=b_s * 1e3, share=a_s / b_s,
            target=TTFT_TARGET, goal="at_most", note=note,
        )  # fmt: skip
    first = {(turn.session, turn.number): turn.output for turn in theirs if turn.number == 1}
    pairs = [(turn.output, first[turn.session, 1]) for turn in ours if (turn.session, turn.number) in first]
    agreed = sum(a[:1] == b[:1] for a, b in pairs)
    stage.row(
        "first tokens of turn 1 that agree", agreed, "", limit=len(pairs), share=agreed / len(pairs),
        note="same weights and prompts; what differs is rounding in near ties",
    )  # fmt: skip


class Kedge:
    """A Side that runs sessions of the real engine. As a replica does, it owns each session's history and its hashes,
    so that a turn costs its new tokens."""

    name = "Kedge"

    def __init__(self, bench: Bench, plan: Plan, step_tokens: int) -> None:
        self._bench, self._plan, self.step_tokens = bench, plan, step_tokens
        self._queue: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._engine: LocalEngine | None = None
        self._chains: dict[str, TokenChain] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        plan = self._plan
        tokens = 2 * plan.shared + plan.sessions * (plan.longest - plan.shared + ROOM)
        scheduler = SchedulerSettings(
            max_batch_tokens=self.step_tokens,
            chunk_size=min(2048, self.step_tokens),
            max_running=plan.sessions,
        )
        with self._bench.engine(self._take, tokens, ExecutionSettings(), scheduler) as engine:
            self._engine = engine
            yield ", ".join(f"{key} {value}" for key, value in engine.describe().items())
        self._engine = None

    def submit(self, name: str, history: Sequence[int], new: Sequence[int], count: int) -> None:
        assert self._engine is not None
        session = name.partition("/")[0]
        chain = self._chains.setdefault(session, self._engine.empty_chain(""))
        chain.extend(history[len(chain) :])
        self._engine.submit(
            GenerateRequest(
                name, list(new), greedy(count), history=history, history_len=len(history), history_chain=chain,
                session_id=None if session.endswith("-0") else session,
            )
        )  # fmt: skip

    def counts(self) -> dict[str, int]:
        assert self._engine is not None
        time.sleep(SETTLE_S)
        stats = self._engine.stats()
        names = (
            "prefill_tokens",
            "cached_tokens",
            "generated_tokens",
            "steps",
            "retractions",
            "evicted_pages",
        )
        return {name: getattr(stats, name) for name in names}

    def events(self, limit_s: float) -> list[Event]:
        try:
            events = self._queue.get(timeout=limit_s)
        except queue.Empty:
            return []
        for event in events:
            if isinstance(event, RuntimeError):
                raise event
        return events

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        now_s = time.perf_counter()
        events: list[Any] = []
        for delta in deltas:
            if delta.finish is not None and delta.finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
                events.append(RuntimeError(f"{delta.request_id}: {delta.finish.error}"))
            else:
                events.append(Event(delta.request_id, now_s, delta.token_ids, delta.finish is not None))
        self._queue.put(events)
