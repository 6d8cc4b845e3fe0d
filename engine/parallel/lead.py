"""Rank 0's Runner: every rank does to the model and to KV what rank 0 does.

Only rank 0 has the books and the scheduler, and only its sampled tokens count. The other ranks see the same batches and
decide in the same way how to run them, so that their collectives match. What they sample is ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from cache.tiers import PoolPages
from engine.batch import ModelOutput, ScheduledBatch
from engine.parallel.protocol import (
    CLONE,
    DROP,
    LAUNCH,
    LOAD,
    SAVE,
    SPILL,
    RanksLost,
    RanksNotStarted,
    packed,
    pages_out,
)
from engine.parallel.team import Team
from engine.parallel.wire import BatchEncoder
from engine.runner.protocol import Launch, Runner

REASON_S = 2.0
"""How long a failed step waits for a rank to report its reason."""

LOOK_S = 1.0


def lead(runner: Runner, team: Team) -> Runner:
    """Rank 0's runner for the engine, once every rank has its own.

    Raises RanksNotStarted if a rank has failed or has different pools. The runner's `close` closes the team.
    """
    own = runner.facts
    for rank, facts in enumerate(team.wait_ready(), 1):
        if facts != own:
            raise RanksNotStarted(f"rank {rank} has {facts}, rank 0 {own}")
    team.ranks.bound(team.timeouts.step_s)
    return LeadRunner(runner, team)


class LeadRunner:
    """A Runner. Every failure of a step is final (RanksLost): after it the ranks may no longer be in step."""

    def __init__(self, runner: Runner, team: Team) -> None:
        self._runner = runner
        self._team = team
        self._followers = team.followers
        size = team.ranks.size
        identity = runner.facts.identity
        # A page is saved to the host by every rank.
        self.facts = replace(
            runner.facts,
            page_size_bytes=runner.facts.page_size_bytes * size,
            window_page_size_bytes=runner.facts.window_page_size_bytes * size,
            identity=replace(identity, kv_format=f"{identity.kv_format} on each of {size} ranks"),
        )
        self._batches = BatchEncoder(runner.facts.page_size)
        self._spoiled: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="kedge-step-watch", daemon=True).start()

    def describe(self) -> dict[str, str | int | float | bool]:
        return {**self._runner.describe(), "tensor_parallel": self._team.ranks.size}

    def launch(self, batch: ScheduledBatch) -> Launch:
        self._team.check()
        self._drop_spoiled()
        message = packed(LAUNCH, self._batches.encode(batch))
        self._busy_since_s = time.monotonic()
        try:
            for follower in self._followers:
                follower.post(message)
            return LeadLaunch(self, self._runner.launch(batch))
        except Exception as error:
            raise self._lost(error) from error
        finally:
            self._busy_since_s = None

    def take(self, launch: Launch) -> ModelOutput:
        """A step's result, if no rank was lost meanwhile."""
        self._busy_since_s = time.monotonic()
        try:
            output = launch.result()
        except Exception as error:
            raise self._lost(error) from error
        finally:
            self._busy_since_s = None
        self._team.check()
        return output

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        copies = self._ask(packed(SAVE, key, pages_out(pages)))
        copies.insert(0, self._runner.save(key, pages))
        return all_done(copies, partial(self._save_ended, key))

    def spill(self, source: int, key: int) -> Future[None]:
        copies = self._ask(packed(SPILL, source, key))
        copies.insert(0, self._runner.spill(source, key))
        return all_done(copies, partial(self._save_ended, key))

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        copies = self._ask(packed(LOAD, key, pages_out(pages)))
        return all_done([self._runner.load(key, pages), *copies])

    def drop(self, key: int) -> None:
        self._post(packed(DROP, key))
        self._runner.drop(key)

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        self._post(packed(CLONE, pages_out(source), pages_out(target)))
        self._runner.clone(source, target)

    def close(self) -> None:
        self._closed.set()
        try:
            self._runner.close()
        finally:
            self._team.close()

    def _post(self, message: bytes) -> None:
        self._team.check()
        self._drop_spoiled()
        for follower in self._followers:
            follower.post(message)

    def _ask(self, message: bytes) -> list[Future[None]]:
        self._team.check()
        self._drop_spoiled()
        return [follower.ask(message) for follower in self._followers]

    def _save_ended(self, key: int, copies: Sequence[Future[None]]) -> None:
        """A save or spill that failed on one rank has failed: what other ranks stored under the key will be dropped.
        Any thread."""
        if any(copy.exception() is not None for copy in copies):
            for rank, copy in enumerate(copies):
                if copy.exception() is None:
                    self._spoiled.put((rank, key))

    def _drop_spoiled(self) -> None:
        while not self._spoiled.empty():
            rank, key = self._spoiled.get()
            if rank == 0:
                self._runner.drop(key)
            else:
                self._followers[rank - 1].post(packed(DROP, key))

    def _lost(self, error: Exception) -> RanksLost:
        """The best known reason why the step failed. The team ends with it."""
        failure = self._team.failure_soon(REASON_S)
        if failure is not None:
            return failure
        self._team.fail(f"rank 0: {type(error).__name__}: {error}")
        return self._team.failure or RanksLost(str(error))

    def _watch(self) -> None:
        """Ends the team when a step takes too long: GPUs would wait for each other without end."""
        limit_s = self._team.timeouts.step_s + 2 * LOOK_S  # after gloo's own timeout, which knows the reason
        while not self._closed.wait(LOOK_S):
            since_s = self._busy_since_s
            if since_s is not None and time.monotonic() - since_s > limit_s:
                self._team.fail(f"a step has not ended after {limit_s} s")
                return


class LeadLaunch:
    """A Launch."""

    def __init__(self, lead: LeadRunner, launch: Launch) -> None:
        self._lead = lead
        self._launch = launch

    def result(self) -> ModelOutput:
        return self._lead.take(self._launch)


def all_done(
    copies: Sequence[Future[None]], ended: Callable[[Sequence[Future[None]]], None] | None = None
) -> Future[None]:
    """Done when every copy is done, with the first error in their order if there is one. `ended` is called before
    that."""
    together: Future[None] = Future()
    left, lock = len(copies), threading.Lock()

    def one_ended(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        if ended is not None:
            ended(copies)
        errors = [error for copy in copies if (error := copy.exception()) is not None]
        if errors:
            together.set_exception(errors[0])
        else:
            together.set_result(None)

    for copy in copies:
        copy.add_done_callback(one_ended)
    return together
