"""A scheduler over NullRunner, without threads. Its books are walked after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.history import History
from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache, token_array
from cache.sequence_kv import SequenceKV
from cache.session_cache import SessionAwareCache
from cache.tiers import TierSizes
from cache.token_chain import TokenChain
from cache.window import WindowPool
from engine.api import (
    ADAPTER_MARK,
    EngineError,
    Finish,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from engine.batch import ModelOutput, ScheduledBatch
from engine.copies import Copies
from engine.scheduler import Scheduler
from engine.settings import SchedulerSettings, SpeculationMethod
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import DraftModelProposer, NoProposer, Proposer
from engine.speculative.step_costs import FREE
from engine.stats import EngineCounters
from engine.stops import StopCriteria
from tests.unit.engine.null_runner import NullRunner, null_generate

VOCAB = 97
DRAFTS = 4
MOST_STEPS = 500


def proposer(method: SpeculationMethod) -> Proposer:
    """A proposer that drafts more often than pays, because these tests are about drafts."""
    if method == "ngram":
        return NgramProposer(2, DRAFTS, FREE)
    return DraftModelProposer(DRAFTS, FREE) if method == "draft" else NoProposer()


def greedy(max_new_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **options)


def request(
    request_id: str, new_tokens: Sequence[int], max_new_tokens: int = 8, **options: Any
) -> GenerateRequest:
    options.setdefault("sampling", greedy(max_new_tokens))
    return GenerateRequest(request_id, list(new_tokens), **options)


def slot_kv(cache: SessionAwareCache, session_id: str) -> SequenceKV:
    """An idle session's KV on the device."""
    slot = cache._slots.get(session_id)
    assert slot is not None
    assert slot.kv is not None
    return slot.kv


@dataclass
class Outcome:
    """Everything a request was told so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenDelta | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.finish is None, f"{delta.request_id} was answered after its final delta"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.input_logprobs += delta.input_logprobs
        assert delta.completion_tokens == len(self.token_ids) or delta.finish is not None
        self.last = delta

    @property
    def finish(self) -> Finish | None:
        return self.last.finish if self.last is not None else None

    @property
    def reason(self) -> FinishReason | None:
        return self.finish.reason if self.finish is not None else None

    @property
    def cached(self) -> int:
        assert self.last is not None
        return self.last.cached_tokens


ADAPTERS = {"a": "fa", "b": "fb"}


class Panic(BaseException):
    """As compiled code raises it, in which tokenizers and grammars work."""


def namespace_of(adapter: str) -> str:
    """As LocalEngine makes it."""
    return f"{ADAPTERS[adapter]}{ADAPTER_MARK}" if adapter else ""


class Driver:
    """Steps a scheduler by hand. A step takes a second. After every step the driver walks the books and poisons the
    free pages, so that a page that is used after it was freed fails the next read."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        context_len: int = 512,
        chunk_size: int = 8,
        max_batch_tokens: int = 24,
        max_running: int = 8,
        eos_probability: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset({0}),
        prefix_cache: bool = True,
        window_len: int | None = None,
        num_window_pages: int = 0,
        host_pages: int = 0,
        disk_pages: int = 0,
        speculation: SpeculationMethod = "off",
        copies_wait: bool = False,
        vocab: int = VOCAB,
        guesser: Proposer | None = None,
        ahead: bool = False,
        decode_steps: int = 1,
    ) -> None:
        """`guesser` replaces the proposer that `speculation` names. With `ahead` a step is planned before the result of
        the step before is taken in."""
        self.ahead = ahead
        self.in_flight: tuple[ScheduledBatch, ModelOutput] | None = None
        self.eos_probability = eos_probability
        self.vocab = vocab
        self.runner = NullRunner(
            num_pages, page_size, vocab, context_len, eos_probability=eos_probability,
            window_len=window_len, num_window_pages=num_window_pages, copies_wait=copies_wait,
            runs_ahead=ahead, adapters=ADAPTERS,
        )  # fmt: skip
        self.allocator = PageAllocator(num_pages)
        self.window = None
        if window_len is not None:
            self.window = WindowPool(PageAllocator(num_window_pages), page_size, window_len)
        self.prefixes = PrefixCache(self.allocator, page_size, enabled=prefix_cache, window=self.window)
        page_bytes = self.runner.facts.page_size_bytes
        sizes = TierSizes(host_pages * page_bytes, disk_pages * page_bytes, page_bytes)
        self.batches: list[ScheduledBatch] = []
        step_tokens = 2 * max(chunk_size, decode_steps) + DRAFTS
        self.cache = SessionAwareCache(self.prefixes, sizes, step_tokens, lambda: float(len(self.batches)))
        self.copies = Copies(self.cache.tiers, self.runner, lambda command: command())
        self.counters = EngineCounters()
        settings = SchedulerSettings(max_batch_tokens, chunk_size, max_running)
        stops = StopCriteria(eos_token_ids, context_len, VOCAB)
        self.scheduler = Scheduler(
            self.cache, stops, settings, self.counters, guesser or proposer(speculation),
            mirrors_prompts=speculation == "draft", decode_steps=decode_steps,
            clock=lambda: float(len(self.batches)),
        )  # fmt: skip
        self.outcomes: dict[str, Outcome] = {}
        self.copying = False  # whether copies that will end were in flight when the last step was planned

    def add(self, spec: GenerateRequest) -> None:
        self.outcomes.setdefault(spec.request_id, Outcome())
        self._take(self.scheduler.add(spec))

    def abort(self, request_id: str) -> None:
        self._take(self.scheduler.abort(request_id))
        self.check()

    def step(self, failure: EngineError | None = None) -> ScheduledBatch | None:
        """Runs one step, as LocalEngine does. The step that was in flight before ends with `failure`, if given. Returns
        None if there was nothing to do."""
        before = self.in_flight
        self.copies.give_up_reads()
        batch = self.scheduler.schedule()
        self.copying = self.cache.awaits_copies
        self.check()  # copies that end at once end here; a real engine hears of them after its step
        self.in_flight = None if batch is None else (batch, self.execute(batch))
        if batch is not None:
            self.batches.append(batch)
        if before is not None and failure is not None:
            self._fail(before[0], failure)
        elif before is not None:
            self._take_in(*before)
        if not self.ahead:
            self.settle()
        if batch is None and before is None and self.scheduler.has_work and not self.copying:
            self._take(self.scheduler.refuse_stuck())
        return batch or (before[0] if before is not None else None)

    def settle(self) -> None:
        """Takes in the step that is in flight."""
        before, self.in_flight = self.in_flight, None
        if before is not None:
            self._take_in(*before)

    def fail_launch(self, error: EngineError) -> None:
        """The device writes the next step's KV, then raises `error`. The step that was in flight before ends
        normally."""
        batch = self.scheduler.schedule()
        self.check()
        if batch is not None:
            self.execute(batch)
            self._fail(batch, error)
        self.settle()

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        return self.runner.launch(batch).result()

    def run(self, limit: int = 2000) -> None:
        """Steps until every request is answered."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.settle()
                return
            assert self.step() is not None or self._copied(), "work waits, but no step runs"
        raise AssertionError(f"{limit} steps were not enough")

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if condition():
                return
            assert self.step() is not None or self._copied(), "nothing left to run"
        raise AssertionError(f"not reached in {MOST_STEPS} steps")

    def generate(self, *specs: GenerateRequest) -> list[Outcome]:
        """Adds the requests together and runs until all requests have ended."""
        for spec in specs:
            self.add(spec)
        self.run()
        return [self.outcomes[spec.request_id] for spec in specs]

    def oracle(self, tokens: Sequence[int], count: int, params: SamplingParams | None = None) -> list[int]:
        return null_generate(tokens, count, self.vocab, eos_probability=self.eos_probability, params=params)

    def held(self, session_id: str) -> int:
        return self.cache.held_tokens().get(session_id, 0)

    def fork(
        self,
        parent_id: str,
        child_id: str,
        history: Sequence[int],
        length: int | None = None,
        chain: TokenChain | None = None,
    ) -> int:
        """Forks as LocalEngine does, at the first `length` tokens of the parent's history (None: all)."""
        length = len(history) if length is None else length
        tokens = token_array(history[:length])
        covered = self.cache.fork_session(parent_id, child_id, tokens, History(history, length, chain))
        self.check()
        return covered

    def end_copies(self, count: int = 1) -> None:
        """Ends the oldest copies between device and host now."""
        self.runner.end_copies(count)

    def end_disk_copies(self, count: int = 1) -> None:
        """Ends the oldest copies to and from the disk now."""
        self.runner.end_disk_copies(count)

    @property
    def tokens_of_steps(self) -> list[int]:
        """How many tokens each launch computed, proposals included."""
        return [batch.num_steps * sum(item.num_tokens for item in batch.items) for batch in self.batches]

    def check(self) -> None:
        self._carry_out()
        self.cache.books.check("strict")
        window = self.window.allocator.free_pages().tolist() if self.window is not None else []
        self.runner.forget(self.allocator.free_pages().tolist(), window)

    def assert_empty(self) -> None:
        """Checks that no request is left, and that after a flush only sessions hold pages."""
        assert not self.scheduler.has_work
        self.cache.flush()
        self.check()
        if self.cache.num_sessions == 0:
            assert self.allocator.num_free == self.allocator.num_pages
            assert self.window is None or self.window.num_free == self.window.num_pages
            tiers = self.cache.tiers
            host, disk = tiers.accounts()
            copying = tiers._copies or tiers._write is not None
            assert host.used_bytes == disk.used_bytes == 0 or copying

    def _fail(self, batch: ScheduledBatch, error: EngineError) -> None:
        for delta in self.scheduler.fail(batch, error):
            self._take(delta)
        self.check()

    def _take_in(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        for delta in self.scheduler.update(batch, output):
            self._take(delta)
        self.check()

    def _carry_out(self) -> None:
        self.copies.carry_out()

    def _copied(self) -> bool:
        """Ends the oldest copies, as they would end by themselves. Returns whether a request may have waited for
        one."""
        self.end_copies()
        self.end_disk_copies()
        return self.copying

    def _take(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self.outcomes[delta.request_id].take(delta)


class Talk:
    """A session seen from outside: its committed history, and turns checked against the oracle."""

    def __init__(self, driver: Driver, session_id: str) -> None:
        self.driver = driver
        self.session_id = session_id
        self.history: list[int] = []
        self.turns = 0

    def spec(
        self, new_tokens: Sequence[int], max_new_tokens: int = 4, *, keep: int | None = None, **options: Any
    ) -> GenerateRequest:
        """The session's next turn. With `keep` the turn first rewinds to that many tokens."""
        self.turns += 1
        length = len(self.history) if keep is None else keep
        return request(
            f"{self.session_id}/{self.turns}", new_tokens, max_new_tokens,
            history=self.history, history_len=length, session_id=self.session_id, **options,
        )  # fmt: skip

    def commit(self, spec: GenerateRequest, outcome: Outcome) -> None:
        """Checks a finished turn token for token and adds it to the history."""
        prompt = [*spec.history[: spec.history_len], *spec.new_tokens]
        expected = self.driver.oracle(prompt, spec.sampling.max_new_tokens, spec.sampling)
        assert outcome.token_ids == expected[: len(outcome.token_ids)]
        if outcome.reason is FinishReason.LENGTH:
            assert len(outcome.token_ids) == len(expected)
        self.history = prompt + outcome.token_ids

    def turn(self, new_tokens: Sequence[int], max_new_tokens: int = 4, **options: Any) -> Outcome:
        spec = self.spec(new_tokens, max_new_tokens, **options)
        (outcome,) = self.driver.generate(spec)
        self.commit(spec, outcome)
        return outcome
