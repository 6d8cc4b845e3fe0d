"""Random multi-turn schedules with a real model: requests and the disturbances they meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from engine.api import FinishReason, GenerateRequest, TokenLogprob
from engine.attention.choose import AttentionChoice, choose_attention
from engine.build_runner import StepLimits, device_runner
from engine.models.loader import LoadedModel
from engine.parallel.ranks import OneRank
from engine.runner.device_runner import DeviceRunner
from engine.runner.graphs import make_graphs
from engine.runner.kv_pool import KVPool, make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ExecutionSettings
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.step_costs import FREE
from tests.unit.engine.driver import DRAFTS, Driver, request

LONGEST = 96
"""Number of tokens of the longest sequence."""

MOST_STEPS = 4
"""The most decode steps in one launch."""

POOLS = {1: 110, 16: 7, 256: 2}
"""Number of pages in the pool by page size: little more than the longest sequence needs."""


class PoisonedRunner(TorchRunner):
    """A runner that fills every free page with NaN, so that KV that is read after it was freed changes the logits."""

    def forget(self, pages: Iterable[int], window_pages: Iterable[int] = ()) -> None:
        for paged, free in ((self._pool.full, pages), (self._pool.window, window_pages)):
            if paged is not None:
                slots = paged.kv_LJKSD.unflatten(3, (paged.num_pages, paged.page_size))
                slots[:, :, :, list(free)] = torch.nan


class TorchDriver(Driver):
    """The scheduler, stepped by hand, with a real model and pools of its own. With `ahead` the runner is that for GPUs:
    a step is planned and launched before the tokens of the step before are known."""

    def __init__(self, loaded: LoadedModel, page_size: int, **limits: Any) -> None:
        num_pages, layout = POOLS[page_size], loaded.layout
        super().__init__(
            num_pages=num_pages, page_size=page_size, context_len=LONGEST + 1, eos_token_ids=frozenset(),
            window_len=layout.window, num_window_pages=num_pages, **limits
        )  # fmt: skip
        settings = CacheSettings(page_size, num_pages, window_ratio=1.0)
        pool = make_kv_pool(layout, settings, loaded.dtype, loaded.device)
        attention = choose_attention("auto", pool, loaded.device)
        plain = PoisonedRunner(loaded.model, pool, attention.items, loaded.vocab_size, LONGEST + 1)
        self.runner = plain  # type: ignore[assignment]
        if self.ahead:
            self.runner = poisoned_device_runner(loaded, pool, attention, plain)  # type: ignore[assignment]
        self.check()


def poisoned_device_runner(
    loaded: LoadedModel, pool: KVPool, attention: AttentionChoice, plain: PoisonedRunner
) -> DeviceRunner:
    """A DeviceRunner whose ladder of graphs is too short for some steps."""
    execution = ExecutionSettings(max_graph_tokens=12, decode_steps=MOST_STEPS)
    loaded = replace(loaded, max_context_len=LONGEST + 1)
    limits = StepLimits(64, 8, 64, MOST_STEPS)
    graphs = make_graphs(loaded.device, wanted=loaded.native)
    runner = device_runner(loaded, plain, pool, attention, limits, graphs, execution, OneRank())
    runner.capture()
    runner.forget = plain.forget  # type: ignore[attr-defined]
    return runner


@dataclass
class Finished:
    """A request that finished well: the whole sequence and the length of its prompt, with the log-probabilities of the
    rest if they were asked for."""

    tokens: list[int]
    prompt_len: int
    what: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    adapter: str = ""


@dataclass
class Schedule:
    """One random schedule. `run` drives it to its end; `finished` is what must agree with the reference."""

    driver: Driver
    rng: random.Random
    vocab_size: int
    histories: dict[str, list[int]] = field(default_factory=lambda: {f"s{n}": [] for n in range(4)})
    in_flight: dict[str, GenerateRequest] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    aborted: int = 0
    rewound: int = 0
    _names: int = 0

    @classmethod
    def over_model(cls, loaded: LoadedModel, seed: int) -> Schedule:
        return cls.make(partial(TorchDriver, loaded), loaded.vocab_size, seed)

    @classmethod
    def make(cls, make_driver: Callable[..., Driver], vocab_size: int, seed: int) -> Schedule:
        rng = random.Random(seed)
        driver = make_driver(
            page_size=(1, 16, 256)[seed % 3],
            chunk_size=rng.choice([1, 3, 7, 16, 64]),
            max_batch_tokens=rng.choice([8, 16, 64]),
            max_running=rng.choice([1, 4, 8]),
            guesser=NgramProposer(1, DRAFTS, FREE) if seed % 2 else None,
            ahead=seed // 2 % 2 == 1,
            decode_steps=rng.choice([1, MOST_STEPS]),
        )
        return cls(driver, rng, vocab_size)

    def run(self) -> None:
        for _ in range(self.rng.randrange(35, 50)):
            self._act()
        self.driver.run()
        self._settle()
        for session_id in self.histories:
            self.driver.cache.release_session(session_id)
        self.driver.assert_empty()

    def _act(self) -> None:
        draw = self.rng.random()
        if draw < 0.35:
            self._begin_turn(self.rng.choice(list(self.histories)))
        elif draw < 0.42:
            self._submit(self._tokens(1, 40), None, [])
        elif draw < 0.82:
            for _ in range(self.rng.randrange(1, 5)):
                self.driver.step()
        elif draw < 0.92:
            self._disturb()
        elif draw < 0.96:
            self.driver.prefixes.evict(self.rng.randrange(1, 6))
        else:
            session_id = self.rng.choice(list(self.histories))
            if not self.driver.scheduler.in_turn(session_id):
                self.driver.cache.rewind_session(session_id, self.rng.randrange(LONGEST))
        self.driver.check()
        self._settle()

    def _disturb(self) -> None:
        if self.in_flight:
            name = self.rng.choice(list(self.in_flight))
            if self.rng.random() < 0.25:
                self.driver.abort(name)
            else:
                self.driver.scheduler.retract(name)

    def _begin_turn(self, session_id: str) -> None:
        if self.driver.scheduler.in_turn(session_id):
            return
        history = self.histories[session_id]
        new_tokens = self._tokens(1, 24)
        if len(history) > LONGEST - 48 or (history and self.rng.random() < 0.3):
            self.rewound += 1
            history = history[: self.rng.randrange(min(len(history), LONGEST - 48))]
        self._submit(new_tokens, session_id, history)

    def _submit(self, new_tokens: list[int], session_id: str | None, history: list[int]) -> None:
        self._names += 1
        spec = request(
            f"{session_id or 'plain'}/{self._names}", new_tokens, self.rng.randrange(1, 24),
            history=history, history_len=len(history), session_id=session_id, priority=self.rng.randrange(2),
        )  # fmt: skip
        self.in_flight[spec.request_id] = spec
        self.driver.add(spec)

    def _settle(self) -> None:
        for name in [name for name in self.in_flight if self.driver.outcomes[name].finish is not None]:
            spec, outcome = self.in_flight.pop(name), self.driver.outcomes[name]
            if outcome.reason is FinishReason.ABORT:
                self.aborted += 1
                continue
            assert outcome.reason is FinishReason.LENGTH
            assert len(outcome.token_ids) == spec.sampling.max_new_tokens
            prompt = [*spec.history[: spec.history_len], *spec.new_tokens]
            self.finished.append(Finished(prompt + outcome.token_ids, len(prompt), name))
            if spec.session_id is not None:
                self.histories[spec.session_id] = prompt + outcome.token_ids

    def _tokens(self, shortest: int, longest: int) -> list[int]:
        """Random tokens. Every third time the tokens are a prefix that other requests share."""
        count = self.rng.randrange(shortest, longest + 1)
        if self.rng.random() < 0.33:
            return [3 + n % 50 for n in range(count)]
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]
