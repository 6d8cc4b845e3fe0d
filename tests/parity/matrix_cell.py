"""One cell of the matrix: eight sessions of six turns, at the same time, through the engine, with all disturbances.

The engine is the real one. It is stepped by hand instead of by its thread, so that a cell is repeatable. The books are
checked after every step, and free pages are filled with NaN, so that KV that is read after it was freed changes the
tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from engine.api import (
    ContextLengthExceeded,
    FinishReason,
    GenerateRequest,
    LogprobParams,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from engine.assembly import assemble_engine
from engine.attention.choose import choose_attention
from engine.build_runner import StepLimits, build_runner, device_runner
from engine.engine import LocalEngine
from engine.models.loader import LoadedModel
from engine.parallel.ranks import OneRank
from engine.runner.device_runner import DeviceRunner
from engine.runner.graphs import make_graphs
from engine.runner.torch_runner import TorchRunner
from engine.settings import (
    CacheSettings,
    ExecutionSettings,
    SchedulerSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from tests.parity.place import DEVICE, careful
from tests.parity.schedules import Finished

SESSIONS = 8
TURNS = 6
CONTEXT = 112
POOLS = {1: 300, 16: 20, 256: 5}
"""Number of pages by page size: about half of what all sessions hold at their ends."""
HOST_PAGES = {1: 120, 16: 8, 256: 2}
RETRACTING_STEPS = 400
MOST_STEPS = 4000
MOST_DRAFTS = 5


@dataclass(frozen=True)
class Cell:
    speculation: SpeculationMethod
    page_size: int
    chunked: bool
    retracting: bool
    seed: int
    top: int = 0
    """Number of likely tokens whose log-probabilities every request asks for; 0 leaves it to chance whether it asks."""
    adapters: tuple[str, ...] = ()
    """Each request has one of these; none has one if it is empty."""
    ahead: bool = False
    """Whether steps are planned ahead on a CPU, too, and several run in one launch."""


@dataclass
class Flight:
    """A request in flight. It is aborted after `abort_after` tokens, as when a client disconnects."""

    spec: GenerateRequest
    abort_after: int | None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Scored:
    """The log-probabilities of a prompt's tokens from position `start` on. The token at position 0 has none."""

    prompt: list[int]
    start: int
    logprobs: list[TokenLogprob]
    what: str
    adapter: str = ""


class CellRun:
    """Drives one cell to its end. `finished` and `scored` are what must agree with transformers."""

    def __init__(
        self,
        cell: Cell,
        target: LoadedModel,
        draft: LoadedModel | None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.cell = cell
        self.rng = random.Random(cell.seed)
        self.vocab_size = target.vocab_size
        cache = CacheSettings(
            cell.page_size, POOLS[cell.page_size], window_ratio=1.0, books="strict", host_size_bytes=1
        )
        limits = SchedulerSettings(
            max_batch_tokens=48, chunk_size=5 if cell.chunked else 48, max_running=6, max_context_len=CONTEXT
        )
        execution = ExecutionSettings(max_graph_tokens=12, decode_steps=3 if cell.ahead else 1)
        self.runner = build_runner(target, cache, draft, scheduler=limits, num_drafts=MOST_DRAFTS)
        if cell.ahead and DEVICE.type == "cpu":
            self.runner = planned_ahead(target, careful(self.runner), limits, execution)
        budget = HOST_PAGES[cell.page_size] * self.runner.facts.page_size_bytes
        budget += HOST_PAGES[cell.page_size] * self.runner.facts.window_page_size_bytes
        cache = CacheSettings(**{**_fields(cache), "host_size_bytes": budget})
        speculation = SpeculationSettings(
            cell.speculation, MOST_DRAFTS, ngram_size=2, row_cost=0.0, draft_cost=0.0
        )
        self.engine: LocalEngine = assemble_engine(
            self.runner, cache, limits, speculation, eos_token_ids, self._take, execution
        )
        self.histories: dict[str, list[int]] = {f"s{number}": [] for number in range(SESSIONS)}
        self.turns_left = dict.fromkeys(self.histories, TURNS)
        self.in_flight: dict[str, Flight] = {}
        self.finished: list[Finished] = []
        self.scored: list[Scored] = []
        self.events: Counter[str] = Counter()
        self._names = 0

    def run(self) -> None:
        for number in range(MOST_STEPS):
            if not any(self.turns_left.values()) and not self.in_flight:
                break
            self._act()
            # A prompt with more chunks than there are steps between two retractions would never finish.
            if self.cell.retracting and number % 4 == 0 and number < RETRACTING_STEPS:
                self._retract()
            self._step()
        assert not self.in_flight, f"seed {self.cell.seed}: never answered: {list(self.in_flight)}"
        self._close_everything()

    def _act(self) -> None:
        for session_id in self.histories:
            if self.turns_left[session_id] and not self.engine._scheduler.in_turn(session_id):
                if self.rng.random() < 0.3:
                    self._begin_turn(session_id)
                elif self.rng.random() < 0.03:
                    self._over_long(session_id)
        if any(self.turns_left.values()) and self.rng.random() < 0.05 and len(self.in_flight) < 2 * SESSIONS:
            self._submit(self._tokens(30), None, [])

    def _begin_turn(self, session_id: str) -> None:
        history = self.histories[session_id]
        new_tokens = self._tokens(14)
        if len(history) + len(new_tokens) > CONTEXT - 20:
            history = history[: self.rng.randrange(CONTEXT // 2)]
            self.events["rewind"] += 1
        self.turns_left[session_id] -= 1
        self._submit(new_tokens, session_id, history)

    def _over_long(self, session_id: str) -> None:
        """Begins a turn that is too long. It is refused at once and leaves the session untouched."""
        history = self.histories[session_id]
        held = self.engine._cache.held_tokens().get(session_id)
        with pytest.raises(ContextLengthExceeded):
            self.engine.submit(self._spec(self._tokens(1) * CONTEXT, session_id, history, 4, None))
        self.events["over-long"] += 1
        assert self.engine._cache.held_tokens().get(session_id) == held

    def _submit(self, new_tokens: list[int], session_id: str | None, history: list[int]) -> None:
        # Some requests ask on purpose for more tokens than the context has room for.
        longest = 2 * CONTEXT if self.rng.random() < 0.05 else self.rng.choice([1, 4, 12, 16])
        logprobs = None
        if self.rng.random() < 0.15:
            start = self.rng.choice([0, len(history), self.rng.randrange(len(history) + 1)])
            logprobs = LogprobParams(output=True, top=self.cell.top, input_start=start)
            self.events["log-probabilities of history"] += start < len(history)
        elif self.cell.top:
            logprobs = LogprobParams(output=True, top=self.cell.top)
        spec = self._spec(new_tokens, session_id, history, min(longest, CONTEXT), logprobs)
        abort_after = self.rng.randrange(8) if self.rng.random() < 0.15 else None
        self.in_flight[spec.request_id] = Flight(spec, abort_after)
        self.engine.submit(spec)
        if abort_after == 0:
            self.engine.abort(spec.request_id)

    def _spec(
        self,
        new_tokens: list[int],
        session_id: str | None,
        history: list[int],
        max_new_tokens: int,
        logprobs: LogprobParams | None,
    ) -> GenerateRequest:
        self._names += 1
        stops = frozenset([self.rng.randrange(self.vocab_size)]) if self.rng.random() < 0.3 else frozenset()
        return GenerateRequest(
            f"{session_id or 'plain'}/{self._names}", new_tokens,
            SamplingParams(max_new_tokens, temperature=0.0, stop_token_ids=stops),
            history=history, history_len=len(history), session_id=session_id, logprobs=logprobs,
            priority=self.rng.randrange(2), adapter=self._adapter(session_id),
        )  # fmt: skip

    def _adapter(self, session_id: str | None) -> str:
        """A session has an adapter of its own. Every sixth request has any: left to chance, a run may have few."""
        adapters = self.cell.adapters
        if not adapters:
            return ""
        if session_id is None or self._names % 6 == 0:
            self.events["other adapter"] += 1
            return self.rng.choice(adapters)
        return adapters[int(session_id[1:]) % len(adapters)]

    def _retract(self) -> None:
        running = [request.request_id for request in self.engine._scheduler._running]
        if running:
            self.events["retraction"] += self.engine._scheduler.retract(self.rng.choice(running))

    def _step(self) -> None:
        self.engine._drain_inbox(block=self.engine._stalled)
        self.engine.step()
        prefixes = self.engine._cache._inner
        window = prefixes.window.allocator.free_pages() if prefixes.window is not None else ()
        poison(careful(self.runner), prefixes.allocator.free_pages(), window)

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            flight = self.in_flight[delta.request_id]
            flight.output += delta.token_ids
            flight.logprobs += delta.logprobs
            flight.input_logprobs += delta.input_logprobs
            if delta.finish is not None:
                self._end(self.in_flight.pop(delta.request_id), delta)
            elif flight.abort_after is not None and len(flight.output) >= flight.abort_after:
                self.engine.abort(delta.request_id)

    def _end(self, flight: Flight, delta: TokenDelta) -> None:
        assert delta.finish is not None
        spec = flight.spec
        self.events[str(delta.finish.reason)] += 1
        self.events["draft"] += delta.draft_tokens
        self.events["accepted draft"] += delta.accepted_draft_tokens
        if delta.finish.reason is FinishReason.ABORT:
            return
        assert delta.finish.reason in (FinishReason.LENGTH, FinishReason.STOP), delta.finish
        assert len(flight.output) == delta.completion_tokens <= spec.sampling.max_new_tokens
        assert not set(flight.output[:-1]) & spec.sampling.stop_token_ids, "went on past a stop"
        prompt = [*spec.history[: spec.history_len], *spec.new_tokens]
        assert len(prompt) + len(flight.output) <= CONTEXT
        self.finished.append(
            Finished(prompt + flight.output, len(prompt), spec.request_id, flight.logprobs, spec.adapter)
        )
        start = spec.logprobs.input_start if spec.logprobs is not None else None
        if start is not None:
            self.scored.append(Scored(prompt, start, flight.input_logprobs, spec.request_id, spec.adapter))
        if spec.session_id is not None:
            self.histories[spec.session_id] = prompt + flight.output

    def _close_everything(self) -> None:
        """Closes all sessions. Then every page is free: nothing leaked."""
        cache = self.engine._cache
        self.events["demotion to the host"] += cache.tiers.num_to_host
        self.events["promotion"] += cache.tiers.num_from_host
        for session_id in self.histories:
            self.engine.close_session(session_id)
        self.engine._drain_inbox(block=False)
        while cache.awaits_copies:
            self.engine._drain_inbox(block=True)
        self.engine.flush()
        self.engine._drain_inbox(block=False)
        self.engine.step()
        report = cache.books.audit()
        assert report.clean, report
        assert all(accounts.free == accounts.total for accounts in report.pools.values()), report
        assert report.host.used_bytes == 0
        self.runner.close()

    def _tokens(self, longest: int) -> list[int]:
        """Random tokens. Every third time the tokens are a prefix that other requests share."""
        count = self.rng.randrange(1, longest + 1)
        if self.rng.random() < 0.33:
            return [3 + number % 7 for number in range(count)]
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]


def planned_ahead(
    loaded: LoadedModel, runner: TorchRunner, limits: SchedulerSettings, execution: ExecutionSettings
) -> DeviceRunner:
    """The runner for GPUs around that for CPUs."""
    pool, steps = runner._pool, StepLimits.of(limits, execution, MOST_DRAFTS)
    attention = choose_attention("auto", pool, loaded.device)
    graphs = make_graphs(loaded.device, wanted=True)
    ahead = device_runner(loaded, runner, pool, attention, steps, graphs, execution, OneRank())
    ahead.capture()
    return ahead


def poison(runner: TorchRunner, pages: Sequence[int], window_pages: Sequence[int]) -> None:
    pools = [(runner._pool.full, pages), (runner._pool.window, window_pages)]
    if runner._draft is not None:
        pools.append((runner._draft._pool.full, pages))
    for paged, free in pools:
        if paged is not None and len(free):
            slots = paged.kv_LJKSD.unflatten(3, (paged.num_pages, paged.page_size))
            slots[:, :, :, torch.as_tensor(free, dtype=torch.int64)] = torch.nan


def _fields(settings: CacheSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}
