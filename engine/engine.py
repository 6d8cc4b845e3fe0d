"""The step loop: commands in, schedule, execute, update, deltas out. One thread owns everything behind it."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from cache.audit import AuditReport
from cache.history import History
from cache.prefix_cache import token_array
from cache.session_cache import SessionAwareCache
from cache.slots import KVPlace
from cache.token_chain import TokenChain
from engine.api import (
    ADAPTER_MARK,
    AdapterNotLoaded,
    DeltaSink,
    EngineOverloaded,
    EngineStats,
    EngineStopped,
    GenerateRequest,
    InvalidRequest,
    KVCensus,
    SessionBusy,
    StepFailed,
    TokenDelta,
)
from engine.batch import ScheduledBatch
from engine.copies import Copies
from engine.request_check import RequestLimits, check_request
from engine.runner.protocol import Launch, Runner, RunnerLost
from engine.scheduler import Scheduler
from engine.settings import BooksCheck
from engine.stats import EngineCounters, StatsBoard
from engine.step_thread import StepDriver

T = TypeVar("T")

_logger = logging.getLogger("kedge.engine")


class LocalEngine:
    """Engine (see engine/api.py) on one thread of this process.

    Ownership: `cache`, `scheduler` and `runner` belong to the step thread from `start` on. Other threads only post
    commands to the inbox and read the last published stats. A fault in one model step fails the requests of that step.
    A fault in the books, or the loss of the runner, stops the engine and fails every request.

    At most `max_waiting` requests wait. `driver` runs the step loop. `clock` returns monotonic seconds. `about` is
    reported with what the runner says of itself.
    """

    def __init__(
        self,
        cache: SessionAwareCache,
        scheduler: Scheduler,
        runner: Runner,
        counters: EngineCounters,
        sink: DeltaSink,
        *,
        books: BooksCheck,
        max_waiting: int,
        max_context_len: int,
        driver: StepDriver,
        clock: Callable[[], float],
        about: Mapping[str, float],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._counters = counters
        self._sink = sink
        self._books = books
        self._max_waiting = max_waiting
        self._copies = Copies(cache.tiers, runner, self._post)
        self._in_flight: tuple[ScheduledBatch, Launch] | None = None
        self._stalled = False  # everything that could run waits for copies between device and host
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _accepting against a post racing with the end of the loop
        self._accepting = True
        self._stopping = False
        self._deltas: list[TokenDelta] = []
        self._driver = driver
        self._clock = clock
        self._facts = runner.facts
        self._about = {**runner.describe(), **about}
        self._limits = RequestLimits(self.vocab_size, max_context_len, cache.page_size, cache.num_pages)
        self._stats = StatsBoard(cache, scheduler, counters, self._facts, clock)
        self._crank_began_s: float | None = None  # None: the loop waits for a command

    @property
    def alive(self) -> bool:
        return self._driver.alive and self._accepting

    @property
    def step_age_s(self) -> float:
        began_s = self._crank_began_s
        return 0.0 if began_s is None else max(0.0, self._clock() - began_s)

    @property
    def max_context_len(self) -> int:
        return self._limits.max_context_len

    @property
    def pool_len(self) -> int:
        return self._cache.num_pages * self._cache.page_size

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    def start(self) -> None:
        self._driver.start(self)

    def stop(self, timeout_s: float) -> None:
        """Ends the loop after its current step; requests still live get EngineStopped. Raises TimeoutError."""
        try:
            self._post(self._request_stop)
        except EngineStopped:
            return
        if not self._driver.started:  # never started: nothing else would answer the commands in the inbox
            self._shut(EngineStopped("the engine is shut down"))
            return
        self._driver.join(timeout_s)

    def abandon(self) -> None:
        with self._lock:
            self._accepting = False
            self._inbox.put(self._request_stop)
        self._driver.wake()

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._facts.adapters

    def submit(self, request: GenerateRequest) -> None:
        check_request(request, self._limits)
        if request.adapter:
            request = replace(request, namespace=self._with_adapter(request.namespace, request.adapter))
        # Requests still in the inbox count as waiting: a burst within one step must not slip past the limit.
        if self._scheduler.num_waiting + self._inbox.qsize() >= self._max_waiting:
            raise EngineOverloaded(f"{self._max_waiting} requests are waiting already")
        arrived_s = self._clock()  # the request may wait in the inbox until a step ends
        self._post(lambda: self._emit(self._scheduler.add(request, arrived_s)))

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._emit(self._scheduler.abort(request_id)))

    def close_session(self, session_id: str) -> Future[None]:
        return self._on_idle_session(session_id, lambda: self._scheduler.release_session(session_id))

    def rewind_session(self, session_id: str, length: int) -> Future[None]:
        if length < 0:
            raise InvalidRequest(f"cannot rewind to {length} tokens", param="offset")
        return self._on_idle_session(session_id, lambda: self._cache.rewind_session(session_id, length))

    def empty_chain(self, namespace: str, adapter: str = "") -> TokenChain:
        return self._cache.empty_chain(self._with_adapter(namespace, adapter) if adapter else namespace)

    def fork_session(
        self,
        parent_id: str,
        child_id: str,
        history: Sequence[int],
        history_len: int,
        history_chain: TokenChain | None = None,
    ) -> Future[int]:
        if not 0 <= history_len <= len(history):
            raise InvalidRequest("history_len does not fit the history", param="length")
        if parent_id == child_id:
            raise InvalidRequest(f"session {child_id} cannot fork itself", param="session_id")

        def operation() -> int:
            self._refuse_in_turn(parent_id)
            self._refuse_in_turn(child_id)
            known = History(history, history_len, history_chain)
            return self._cache.fork_session(parent_id, child_id, token_array(history[:history_len]), known)

        return self._call(operation)

    def flush(self) -> Future[bool]:
        def operation() -> bool:
            if self._scheduler.has_work:
                return False
            self._cache.flush()
            return True

        return self._call(operation)

    def stats(self) -> EngineStats:
        return self._stats.latest

    def describe(self) -> dict[str, str | int | float | bool]:
        return self._about

    def session_kv_tokens(self) -> Future[dict[str, int]]:
        return self._call(self._cache.held_tokens)

    def kv_census(self) -> Future[KVCensus]:
        def operation() -> KVCensus:
            num_bytes = self._cache.kv_bytes(self._scheduler.kv_in_turn())
            told: Counter[tuple[str, str]] = Counter()
            for (namespace, tier), count in num_bytes.items():
                told[self._without_adapter(namespace), tier] += count
            return KVCensus(told, self._cache.session_ids())

        return self._call(operation)

    def session_places(self, session_ids: Sequence[str]) -> Future[dict[str, KVPlace]]:
        return self._call(lambda: self._cache.places(session_ids))

    def audit(self) -> Future[AuditReport]:
        return self._call(self._cache.books.audit)

    @property
    def idle(self) -> bool:
        nothing_runs = self._stalled or not self._scheduler.has_work
        return nothing_runs and self._in_flight is None and self._inbox.empty()

    def crank(self, *, wait: bool) -> bool:
        """See StepLoop. Only for the driver."""
        reason = EngineStopped("the engine is shut down")
        try:
            self._drain_inbox(block=wait and self.idle)
            self.step()
            self._stats.publish(now=self.idle)
            self._crank_began_s = None
            if not self._stopping:
                return True
        except BaseException as error:  # a panic of compiled code is no Exception
            _logger.exception("the engine's step loop died")
            reason = EngineStopped(f"the engine died: {type(error).__name__}: {error}")
        self._shut(reason)
        return False

    def step(self) -> bool:
        """Plans and launches a step, then takes in the result of the step before (its own if the runner does not run
        ahead). False if there was nothing to do. Only for the step thread and tests."""
        before = self._in_flight
        self._copies.give_up_reads()
        batch = self._scheduler.schedule()
        self._copies.carry_out()
        self._in_flight = None if batch is None else self._launch(batch)
        if before is not None:
            self._take_in(*before)
        if self._in_flight is not None and not self._facts.runs_ahead:
            self._take_in(*self._in_flight)
            self._in_flight = None
        idle = batch is None and before is None
        self._stalled = idle and self._cache.awaits_copies
        if idle and self._scheduler.has_work:
            self._emit(self._scheduler.refuse_stuck())
        self._flush_deltas()
        return not idle

    def _launch(self, batch: ScheduledBatch) -> tuple[ScheduledBatch, Launch] | None:
        """None if the launch failed; the batch's requests are then failed."""
        try:
            return batch, self._runner.launch(batch)
        except RunnerLost:
            raise
        except Exception as error:
            self._fail(batch, error)
            return None

    def _take_in(self, batch: ScheduledBatch, launch: Launch) -> None:
        """Waits for a step and gives its result to the scheduler."""
        try:
            output = launch.result()
        except RunnerLost:
            raise
        except Exception as error:
            self._fail(batch, error)
        else:
            self._deltas.extend(self._scheduler.update(batch, output))
            self._counters.steps += batch.num_steps
        self._cache.books.check(self._books)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> None:
        _logger.error("model step failed", exc_info=error)
        failure = StepFailed(f"the model step failed: {type(error).__name__}: {error}")
        self._deltas.extend(self._scheduler.fail(batch, failure))

    def _drain_inbox(self, *, block: bool) -> None:
        try:
            command = self._wait() if block else None
            self._crank_began_s = self._clock()
            if command is not None:
                command()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _wait(self) -> Callable[[], None] | None:
        """The next command. None: requests wait for a read from disk that is to be given up now."""
        try:
            return self._inbox.get(timeout=self._copies.patience_s if self._stalled else None)
        except queue.Empty:
            return None

    def _shut(self, reason: EngineStopped) -> None:
        with self._lock:
            self._accepting = False
        # Nothing is posted from here on. Run the commands that came before, so that every caller gets an answer, even
        # if the books are broken and some commands fail.
        while not self._inbox.empty():
            try:
                self._inbox.get()()
            except Exception:
                _logger.exception("a command failed while the engine shut down")
        self._deltas.extend(self._scheduler.abandon_all(reason))
        try:
            self._flush_deltas()
        finally:
            self._runner.close()

    def _request_stop(self) -> None:
        self._stopping = True

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._accepting:
                raise EngineStopped("the engine is not running")
            self._inbox.put(command)
        self._driver.wake()

    def _call(self, operation: Callable[[], T]) -> Future[T]:
        """Runs `operation` on the step thread, between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)

        self._post(command)
        return future

    def _on_idle_session(self, session_id: str, operation: Callable[[], None]) -> Future[None]:
        def checked() -> None:
            self._refuse_in_turn(session_id)
            operation()

        return self._call(checked)

    def _with_adapter(self, namespace: str, adapter: str) -> str:
        """The namespace for KV of this adapter: by its contents, since another engine may have another one of the same
        name. Raises AdapterNotLoaded."""
        fingerprint = self._facts.adapters.get(adapter)
        if fingerprint is None:
            raise AdapterNotLoaded(f"the adapter {adapter!r} is not loaded", param="model")
        return f"{fingerprint}{ADAPTER_MARK}{namespace}"

    def _without_adapter(self, namespace: str) -> str:
        fingerprint, mark, rest = namespace.partition(ADAPTER_MARK)
        return rest if mark and fingerprint in self._facts.adapters.values() else namespace

    def _refuse_in_turn(self, session_id: str) -> None:
        if self._scheduler.in_turn(session_id):
            raise SessionBusy(f"session {session_id} has a turn in flight", param="session_id")

    def _emit(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self._deltas.append(delta)

    def _flush_deltas(self) -> None:
        if self._deltas:
            deltas: Sequence[TokenDelta] = self._deltas
            self._sink(deltas)
            self._deltas = []  # only cleared now: if the sink fails, the shutdown sends them again
