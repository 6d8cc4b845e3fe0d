"""How rank 0 gathers, commands, hears and ends the other ranks."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from engine.parallel.link import Link, receive_hello
from engine.parallel.process_ranks import ProcessRanks, join_ranks, make_store
from engine.parallel.protocol import (
    CLOSE,
    DONE,
    READY,
    RanksLost,
    RanksNotStarted,
    Ticket,
    Timeouts,
    packed,
    unpacked,
)
from engine.runner.protocol import RunnerFacts

HELLO_S = 5.0
LOOK_S = 0.5
TOKEN_BYTES = 32

_logger = logging.getLogger("kedge.ranks")


class RankProcess(Protocol):
    """A process that runs engine.parallel.follow.run_rank with a ticket, as seen from where it was started."""

    def ended(self) -> str | None:
        """Why it no longer runs; None while it does. Returns at once."""

    def kill(self) -> None:
        """Ends it if it still runs. Returns at once."""


RankStarter = Callable[[Sequence[Ticket]], Sequence[RankProcess]]
"""Starts a process for each ticket, without waiting for them."""


class LinkedFollower:
    """Another rank, over a Link. It carries out messages in the order in which they were posted. `ready` is done when
    the rank's runner is made. `lost` is called once with the reason why the rank is gone, on a thread of this
    object."""

    def __init__(self, rank: int, link: Link, lost: Callable[[str], None]) -> None:
        self.ready: Future[RunnerFacts] = Future()
        self._rank = rank
        self._link = link
        self._lost = lost
        self._posted = 0
        self._closing = False
        self._gone: str | None = None
        self._asked: dict[int, Future[None]] = {}
        self._lock = threading.Lock()  # guards _asked and _gone
        self._thread = threading.Thread(target=self._listen, name=f"kedge-rank-{rank}", daemon=True)
        self._thread.start()

    def post(self, message: bytes) -> None:
        """Raises RanksLost."""
        self._posted += 1
        try:
            self._link.send(message)
        except OSError as error:
            raise RanksLost(self._gone or f"rank {self._rank} takes no more commands: {error}") from error

    def ask(self, message: bytes) -> Future[None]:
        """As `post`. The future is done when the rank has carried the message out, with RanksLost if the rank is gone
        before that."""
        answer: Future[None] = Future()
        with self._lock:
            if self._gone is not None:
                raise RanksLost(self._gone)
            self._asked[self._posted + 1] = answer
        self.post(message)
        return answer

    def end(self) -> None:
        """Tells the rank to end once it has carried out what was posted."""
        self._closing = True
        if self._gone is None:
            try:
                self.post(packed(CLOSE))
            except RanksLost:
                _logger.warning("rank %d could not be told to end", self._rank)

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the rank's end, then closes the connection."""
        self._thread.join(timeout_s)
        self._link.close()

    def _listen(self) -> None:
        reason = "it ended without a word"
        try:
            while (message := self._link.receive()) is not None:
                kind, *parts = unpacked(message)
                if kind == DONE:
                    self._answered(*parts)
                elif kind == READY:
                    self.ready.set_result(*parts)
                else:
                    (reason,) = parts
        except OSError as error:
            reason = str(error)
        self._end(f"rank {self._rank} is gone: {reason}")

    def _answered(self, number: int, error: str | None, code: int | None) -> None:
        with self._lock:
            answer = self._asked.pop(number)
        if error is None:
            answer.set_result(None)
        elif code is None:
            answer.set_exception(RuntimeError(f"rank {self._rank}: {error}"))
        else:
            answer.set_exception(OSError(code, f"rank {self._rank}: {error}"))

    def _end(self, reason: str) -> None:
        with self._lock:
            self._gone = reason
            unanswered = list(self._asked.values())
            self._asked.clear()
        if not self._closing:
            self._lost(reason)
        for answer in unanswered:
            answer.set_exception(RanksLost(reason))
        if not self.ready.done():
            self.ready.set_exception(RanksNotStarted(reason))


class Team:
    """The other ranks together. The first rank that fails ends the team: the rest cannot run a step."""

    def __init__(
        self, ranks: ProcessRanks, links: Sequence[Link], processes: Sequence[RankProcess], timeouts: Timeouts
    ) -> None:
        self.ranks = ranks
        self.timeouts = timeouts
        self._failure: RanksLost | None = None
        self._failed = threading.Event()
        self._when_lost: Callable[[], None] = lambda: None
        self._processes = processes
        self._lock = threading.Lock()  # guards _failure
        self.followers = [LinkedFollower(rank, link, self.fail) for rank, link in enumerate(links, 1)]

    @property
    def failure(self) -> RanksLost | None:
        return self._failure

    def failure_soon(self, timeout_s: float) -> RanksLost | None:
        """Waits a little for the reason: a failing rank is noticed in several places, and only one of them knows
        why."""
        self._failed.wait(timeout_s)
        return self._failure

    def when_lost(self, callback: Callable[[], None]) -> None:
        """`callback` is called once if the team fails, on any thread; at once if it has failed already."""
        with self._lock:
            if self._failure is None:
                self._when_lost = callback
                return
        callback()

    def fail(self, reason: str) -> None:
        """Ends every wait for a rank. Any thread; the first reason stands."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = RanksLost(reason)
            callback = self._when_lost
        _logger.error("%s", reason)
        self._failed.set()
        callback()
        for process in self._processes:
            process.kill()
        self.ranks.abort()

    def check(self) -> None:
        """Raises RanksLost if the team has failed."""
        if self._failure is not None:
            raise self._failure

    def wait_ready(self) -> list[RunnerFacts]:
        """Raises RanksNotStarted."""
        deadline_s = time.monotonic() + self.timeouts.start_s
        facts = []
        for rank, follower in enumerate(self.followers, 1):
            try:
                facts.append(follower.ready.result(max(0.0, deadline_s - time.monotonic())))
            except TimeoutError:
                message = f"rank {rank} is not ready after {self.timeouts.start_s} s"
                raise RanksNotStarted(message) from None
        return facts

    def close(self) -> None:
        """Ends the ranks: orderly if they live, then by force."""
        for follower in self.followers if self._failure is None else ():
            follower.end()
        deadline_s = time.monotonic() + self.timeouts.stop_s
        for follower in self.followers:
            follower.close(max(0.0, deadline_s - time.monotonic()))
        for process in self._processes:
            process.kill()
        self.ranks.abort()


def gather_team(
    size: int, host: str, device: torch.device, start: RankStarter, timeouts: Timeouts | None = None
) -> Team:
    """Starts the ranks 1 .. size-1 and waits until all are connected, before any model is loaded.

    `host` is this machine's address for them, `device` what rank 0 computes on. Raises RanksNotStarted.
    """
    timeouts = timeouts or Timeouts()
    tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in range(size)]
    with socket.create_server((host, 0)) as server:
        store = make_store(host, timeouts.start_s)
        tickets = [
            Ticket(rank, size, host, server.getsockname()[1], store.port, tokens[rank], timeouts)
            for rank in range(size)
        ]
        processes = start(tickets[1:])
        try:
            links = _accept(server, tokens, processes, timeouts)
            ranks = join_ranks(tickets[0], store, device)
        except BaseException as error:
            for process in processes:
                process.kill()
            if isinstance(error, RuntimeError) and not isinstance(error, RanksNotStarted):
                raise RanksNotStarted(f"the ranks did not find each other: {error}") from error
            raise
    ranks.bound(timeouts.start_s)
    return Team(ranks, links, processes, timeouts)


def _accept(
    server: socket.socket, tokens: Sequence[bytes], processes: Sequence[RankProcess], timeouts: Timeouts
) -> list[Link]:
    """The other ranks' links, by rank."""
    links: dict[int, Link] = {}
    server.settimeout(LOOK_S)
    deadline_s = time.monotonic() + timeouts.start_s
    while len(links) < len(tokens) - 1:
        if time.monotonic() > deadline_s:
            raise RanksNotStarted(f"{len(links) + 1} of {len(tokens)} ranks came within {timeouts.start_s} s")
        for rank, process in enumerate(processes, 1):
            if (reason := process.ended()) is not None:
                raise RanksNotStarted(f"rank {rank} ended at its start: {reason}")
        try:
            connected, _ = server.accept()
        except TimeoutError:
            continue
        rank_received = receive_hello(connected, tokens, HELLO_S)
        if rank_received is None or rank_received in links:
            connected.close()
            continue
        links[rank_received] = Link(connected, timeouts.step_s)
    return [links[rank] for rank in range(1, len(tokens))]
