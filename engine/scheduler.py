"""The scheduler: schedule() picks a step's work, update() takes in its result. No tensors, no threads.

Continuous batching: every step mixes decodes and prompt chunks. The order is by priority, then arrival. When pages run
out, cached prefixes go first, then idle sessions' KV, then the running request that is last in order is retracted. The
first in order is not retracted and fits the pool by itself, so some request always finishes. While copies that will
free pages are in flight, requests that need these sit out steps, and none is retracted for them. The first in order
also waits for other copies, but not for reads from a disk that hangs: these keep their pages for ever.

A step may be planned while the one before is still in flight (schedule, schedule, update, schedule, update ...). The
tokens that it will pick are pending, and their requests continue as if they were known. If a request meanwhile ends, is
retracted, or begins to be held to a constraint or rules, its result in flight is dropped. Pages that it gave back may
be reused at once, since steps run in the order in which they were planned.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from itertools import repeat

from cache.sequence_kv import SequenceKV
from cache.session_cache import Room, SessionAwareCache
from engine.admission import Admission
from engine.api import (
    EngineError,
    EngineOverloaded,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestTooLarge,
    SessionBusy,
    TokenDelta,
    TokenLogprob,
)
from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch
from engine.items import ItemMaker
from engine.request import LiveRequest, Status
from engine.settings import SchedulerSettings
from engine.speculative.proposers import NoProposer, Proposer
from engine.stats import EngineCounters
from engine.stops import StopCriteria


class Scheduler:
    """Owns every live request. Called only from the engine's thread (`num_waiting` may be read anywhere).

    With `mirrors_prompts` a draft model computes its own KV of every prompt along with the target. When no request
    waits, up to `decode_steps` steps are planned in one launch. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        cache: SessionAwareCache,
        stops: StopCriteria,
        settings: SchedulerSettings,
        counters: EngineCounters,
        proposer: Proposer | None = None,
        *,
        mirrors_prompts: bool = False,
        decode_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._cache = cache
        self._stops = stops
        self._settings = settings
        self._counters = counters
        self._proposer = proposer or NoProposer()
        self._maker = ItemMaker(cache, self._proposer, mirrors_prompts=mirrors_prompts)
        self._mirrors_prompts = mirrors_prompts
        self._slides = cache.slides
        self._decode_steps = decode_steps
        self._admission = Admission(cache, settings)
        self._batches_in_flight = 0
        self._runs = 0
        self._live: dict[str, LiveRequest] = {}
        self._sessions_in_turn: set[str] = set()
        self._waiting: list[LiveRequest] = []  # both lists in LiveRequest.order
        self._running: list[LiveRequest] = []
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def kv_utilization(self) -> float:
        """Demand for the KV pools by running and waiting requests, see KVDemand."""
        return self._cache.demand.utilization(
            (request.spec.session_id, len(request.tokens)) for request in self._waiting
        )

    def in_turn(self, session_id: str) -> bool:
        """True from a turn's arrival to its end."""
        return session_id in self._sessions_in_turn

    def kv_in_turn(self) -> Iterator[SequenceKV]:
        """The KV of the running requests."""
        return (request.kv for request in self._running if request.kv is not None)

    def add(self, spec: GenerateRequest, arrived_s: float | None = None) -> TokenDelta | None:
        """Queues a request that arrived at `arrived_s` (by default now). Returns its final delta if it cannot wait,
        since its id or session is in use, or need not wait. Returns its first delta if it resumes."""
        if spec.request_id in self._live:
            error = SessionBusy(f"request id {spec.request_id} is in flight", param="request_id")
            return _refusal(spec, error)
        if spec.session_id is not None:
            if spec.session_id in self._sessions_in_turn:
                return _refusal(spec, SessionBusy(f"session {spec.session_id} has a turn in flight"))
            self._sessions_in_turn.add(spec.session_id)
        request = LiveRequest(spec, self._arrivals, self._clock() if arrived_s is None else arrived_s)
        self._arrivals += 1
        self._live[spec.request_id] = request
        self._queue(request)
        return self._begin(request)

    def abort(self, request_id: str) -> TokenDelta | None:
        """Ends a request now; its session goes back to its last commit. None for unknown ids."""
        request = self._live.get(request_id)
        return None if request is None else self._end(request, Finish(FinishReason.ABORT))

    def fail(self, batch: ScheduledBatch, error: EngineError) -> list[TokenDelta]:
        """A step failed: ends its requests with an error, rolled back like an abort."""
        self._batches_in_flight -= 1
        finish = Finish(FinishReason.ERROR, error=error)
        live = [request for item in batch.items if (request := self._request_of(item)) is not None]
        return [self._end(request, finish) for request in live]

    def abandon_all(self, error: EngineError) -> list[TokenDelta]:
        """Answers every live request when the engine ends. Does not touch the books, which may be broken."""
        finish = Finish(FinishReason.ERROR, error=error)
        deltas = [request.delta((), finish=finish) for request in self._live.values()]
        self._live.clear()
        self._sessions_in_turn.clear()
        self._waiting.clear()
        self._running.clear()
        return deltas

    def retract(self, request_id: str) -> bool:
        """Running -> waiting: the turn's pages are given back, its tokens stay, and it resumes exactly. False if not
        running.

        Call it only between two steps, or from within `schedule`.
        """
        request = self._live.get(request_id)
        if request is None or request.status is not Status.RUNNING:
            return False
        self._counters.retractions += 1
        self._running.remove(request)
        self._admission.begin_anew()
        self._give_back(request)
        request.status = Status.WAITING
        self._queue(request)
        return True

    def release_session(self, session_id: str) -> None:
        """Forgets an idle session's KV. Raises cache.session_cache.SessionBorrowed during a turn."""
        self._cache.release_session(session_id)
        self._proposer.forget(session_id)

    def schedule(self) -> ScheduledBatch | None:
        """Plans one step, which is in flight from then on; None if nothing can run now. May retract running requests,
        unless a step is in flight: then it plans no step, since the result may free the missing pages."""
        assert self._batches_in_flight <= 1
        budget = self._settings.max_batch_tokens
        items: list[BatchItem] = []
        short = False
        # Decodes first: a long prompt must not delay other requests' next tokens. Nor may drafts: of the budget a token
        # is kept for each decode still to come, and for prompts a chunk, or half of the step.
        requests, num_decodes = self._decodes_first()
        prompts = min(self._settings.chunk_size, budget // 2) if self._has_prompts(num_decodes) else 0
        retractions = self._counters.retractions
        for place, request in enumerate(requests, 1):
            kv = request.kv
            if budget == 0 or kv is None or (request.in_flight and not self._maker.can_go_on(request)):
                continue  # retracted meanwhile, or it has to wait for a result or for the next step
            count = (
                1 if place <= num_decodes else min(request.num_uncomputed, self._settings.chunk_size, budget)
            )
            if count == 0:
                continue
            if not kv.reach(request.launched_len + count):
                room = self._make_room(request, count)
                if room is Room.SHORT and self._batches_in_flight:
                    return None
                short = short or room is Room.WAIT
                if room is not Room.READY:
                    continue
            item = self._maker.make(request, count, budget - max(num_decodes - place, 0) - prompts)
            items.append(item)
            budget -= item.budget_tokens
        if self._counters.retractions > retractions:
            items = self._without_retracted(items)
        # While running requests wait for pages, no request joins them. It could take back a session that is being saved
        # to the host to free its pages; then they would wait for ever.
        if self._waiting and not short:
            self._admit_waiting(items, budget)
        if not items:
            return None
        return self._launch(ScheduledBatch(items, 1 if short else self._num_steps(items)))

    def refuse_stuck(self) -> TokenDelta | None:
        """Ends the first waiting request if it found no room although nothing runs and no copy will end: it would wait
        for ever. That happens if a disk hangs to which pages are lent. Otherwise admission's limits make it impossible;
        should they be wrong, the request is still answered."""
        if self._running or not self._waiting or self._batches_in_flight or self._cache.awaits_copies:
            return None
        request = self._waiting[0]
        accounts = self._cache.books.accounts()
        error: EngineError
        if self._cache.disk_hangs:
            error = EngineOverloaded(f"the disk does not answer, and keeps pages of the KV pool: {accounts}")
        else:
            error = RequestTooLarge(
                f"{len(request.tokens)} tokens found no room in an idle KV pool: {accounts}"
            )
        return self._end(request, Finish(FinishReason.ERROR, error=error))

    def update(self, batch: ScheduledBatch, output: ModelOutput) -> list[TokenDelta]:
        """Takes in a step's result: commits KV, accepts tokens, ends what is done."""
        self._batches_in_flight -= 1
        deltas = []
        for item, result in zip(batch.items, output.items, strict=True):
            request = self._request_of(item)
            if request is None:
                continue
            kv = request.kv
            assert kv is not None
            draft_len = self._maker.draft_len(item.draft, kv.draft_len) if self._mirrors_prompts else None
            kv.commit(request.answered(item, batch.num_steps, len(result.token_ids)), draft_len)
            if request.next_input_logprob is not None:
                request.next_input_logprob = _following_input_logprob(request, kv.committed_len)
            if request.num_output == 0 and request.shares_prompt and item.certain_len == request.prompt_len:
                self._cache.cache_unfinished(kv, request.tokens.array(request.prompt_len))
                self._admission.begin_anew()
            delta = self._accept(request, item, result)
            if delta is not None:
                deltas.append(delta)
            if self._slides and request.status is Status.RUNNING:
                self._cache.slide(kv, request.rollback_len)
        return deltas

    def _begin(self, request: LiveRequest) -> TokenDelta | None:
        """The delta that repeats a request's resumed tokens, if it has any. It may already be the last."""
        finish = self._stops.begin(request)
        known = tuple(request.spec.resumed_tokens[: request.num_output])
        if finish is not None:
            return self._end(request, finish, known)
        return request.delta(known) if known else None

    def _accept(self, request: LiveRequest, item: BatchItem, result: ItemOutput) -> TokenDelta | None:
        token_ids, logprobs, finish = result.token_ids, result.logprobs, None
        was_held = request.is_held
        for accepted, token_id in enumerate(token_ids, 1):
            request.accept(token_id)
            finish = self._stops.check(request, token_id)
            if finish is not None or (request.is_held and not was_held):
                token_ids, logprobs = token_ids[:accepted], logprobs[:accepted]
                break
        self._counters.generated_tokens += len(token_ids)
        if result.num_proposed:
            self._count_drafts(request, result)
        if finish is None and request.is_held and not was_held:
            self._take_back(request)
        if finish is None and (item.sample is None or was_held or request.is_held):
            finish = self._end_of_step(request, item)
        if finish is not None:
            return self._end(request, finish, token_ids, logprobs, result.input_logprobs)
        if not token_ids and not result.input_logprobs:
            return None
        return request.delta(token_ids, logprobs, result.input_logprobs)

    def _take_back(self, request: LiveRequest) -> None:
        """The request is held to a constraint or rules from here on, so tokens picked further on, or in flight, are
        ignored."""
        self._runs += 1
        request.take_back(self._runs)

    def _end_of_step(self, request: LiveRequest, item: BatchItem) -> Finish | None:
        """How a request ends that its accepted tokens did not end; None if it goes on."""
        if item.sample is not None:
            return self._stops.allow(request)
        return Finish(FinishReason.LENGTH) if item.next_token is None else None  # the request picks no token

    def _count_drafts(self, request: LiveRequest, result: ItemOutput) -> None:
        agreed = len(result.token_ids) - 1
        request.draft_tokens += result.num_proposed
        request.accepted_draft_tokens += agreed
        self._counters.draft_tokens += result.num_proposed
        self._counters.accepted_draft_tokens += agreed
        self._proposer.observe(request, result.num_proposed, agreed)

    def _admit_waiting(self, items: list[BatchItem], budget: int) -> None:
        """Adds an item for every waiting request that may run now."""
        if budget == 0 or len(self._running) >= self._settings.max_running:
            return
        self._admission.resume(self._running)
        while (place := self._admission.place) is not None and place < len(self._waiting):
            request = self._waiting[place]
            verdict = self._admission.ask(request, budget)
            if verdict.num_tokens:
                self._start(request)
                items.append(self._maker.make(request, verdict.num_tokens, budget))
                budget -= items[-1].budget_tokens
                if budget == 0 or len(self._running) >= self._settings.max_running:
                    return

    def _start(self, request: LiveRequest) -> None:
        """Waiting -> running, with the KV that admission gave it."""
        kv = request.kv
        assert kv is not None
        if request.cached_tokens is None:
            request.cached_tokens = min(kv.committed_len, request.prompt_len)
            request.queued_s = self._clock() - request.arrived_s
            self._counters.cached_tokens += request.cached_tokens
        self._counters.prefill_tokens += len(request.tokens) - kv.committed_len
        self._waiting.remove(request)
        self._runs += 1
        request.begin_run(self._runs)
        if request.spec.on_admitted is not None:
            request.spec.on_admitted()
        insort(self._running, request, key=_order)
        if request.spec.session_id is not None:
            self._cache.unexpect(request.spec.session_id)
        self._proposer.begin(request)

    def _num_steps(self, items: list[BatchItem]) -> int:
        """How many steps to run in one launch: several if every request decodes, none waits (neither in the queue nor
        for a result that its next step needs), and pages are free."""
        if self._decode_steps == 1 or self._waiting or any(item.sample is None for item in items):
            return 1
        if any(map(self._maker.step_by_step, self._running)):
            return 1
        requests = [self._live[item.request_id] for item in items]
        wanted = min(self._decode_steps, self._settings.max_batch_tokens // len(items))
        for request, item in zip(requests, items, strict=True):
            wanted = min(wanted, request.output_left if len(item.token_ids) == 1 else 1)
        if wanted < 2 or not all(map(self._maker.cover, requests, items, repeat(wanted))):
            return 1
        return wanted

    def _launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        self._batches_in_flight += 1
        for place, item in enumerate(batch.items):
            self._live[item.request_id].launch(item, place, batch.num_steps)
        return batch

    def _request_of(self, item: BatchItem) -> LiveRequest | None:
        """The request that launched the item, if that run is not over. Another request may have its id by now."""
        request = self._live.get(item.request_id)
        return request if request is not None and request.run == item.run else None

    def _has_prompts(self, num_decodes: int) -> bool:
        """Whether prompts are computed beside these decodes, or wait for nothing but the step's budget or pages."""
        num_running = len(self._running)
        return num_decodes < num_running or (bool(self._waiting) and num_running < self._settings.max_running)

    def _decodes_first(self) -> tuple[list[LiveRequest], int]:
        """The running requests, those that decode first, and how many do."""
        decodes = [request for request in self._running if request.total_len - request.launched_len == 1]
        if len(decodes) < len(self._running):
            others = [request for request in self._running if request.total_len - request.launched_len != 1]
            return decodes + others, len(decodes)
        return decodes, len(decodes)

    def _make_room(self, request: LiveRequest, count: int) -> Room:
        """Gets pages for `count` more tokens, retracting requests from the end of the order. SHORT: `request` itself
        was retracted, or a retraction is needed while a step is in flight. WAIT: copies will free pages, or `request`
        is the only one left and others' copies hold them."""
        kv = request.kv
        assert kv is not None
        while True:
            room = self._cache.extend(kv, request.launched_len + count)
            if room is not Room.SHORT or self._batches_in_flight:
                return room
            victim = self._running[-1]
            if victim is self._running[0] and self._cache.awaits_copies:
                return Room.WAIT
            self.retract(victim.request_id)
            if victim is request:
                return room

    def _queue(self, request: LiveRequest) -> None:
        insort(self._waiting, request, key=_order)
        if request is not self._waiting[-1]:
            self._admission.begin_anew()
        if request.spec.session_id is not None:
            self._cache.expect(request.spec.session_id, request.order)

    def _without_retracted(self, items: list[BatchItem]) -> list[BatchItem]:
        return [item for item in items if self._live[item.request_id].status is Status.RUNNING]

    def _give_back(self, request: LiveRequest) -> None:
        """Takes the KV of an unfinished request away from it."""
        assert request.kv is not None
        spec = request.spec
        self._cache.give_back(request.kv, spec.session_id, request.tokens, spec.history_len)
        request.end_run()

    def _end(
        self,
        request: LiveRequest,
        finish: Finish,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        input_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> TokenDelta:
        """Ends a request in any state: settles its KV, makes the final delta, forgets the request."""
        kv, session_id = request.kv, request.spec.session_id
        done = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if kv is not None and done:
            request.end_run()
            if session_id is None:
                self._cache.finish(kv, request.tokens.array())
            else:
                self._cache.finish_turn(session_id, kv, request.tokens)
        elif kv is not None:
            self._give_back(request)
        (self._proposer.commit if done else self._proposer.rollback)(request)
        (self._running if request.status is Status.RUNNING else self._waiting).remove(request)
        self._admission.begin_anew()
        request.status = Status.FINISHED
        del self._live[request.request_id]
        if session_id is not None:
            self._sessions_in_turn.discard(session_id)
            self._cache.unexpect(session_id)
        return request.delta(token_ids, logprobs, input_logprobs, finish)


def _refusal(spec: GenerateRequest, error: EngineError) -> TokenDelta:
    """The only delta of a request that never went live."""
    finish = Finish(FinishReason.ERROR, error=error)
    return TokenDelta(spec.request_id, (), spec.prompt_len, 0, 0, finish=finish)


def _order(request: LiveRequest) -> tuple[int, int]:
    return request.order


def _following_input_logprob(request: LiveRequest, committed_len: int) -> int | None:
    """The next input position whose log-probability is still owed, once logits up to committed_len - 1 are out."""
    assert request.next_input_logprob is not None
    following = max(request.next_input_logprob, committed_len + 1)
    return following if following < request.prompt_len else None
