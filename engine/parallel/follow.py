"""A rank other than 0: holds its share of the model and of every KV page, and carries out rank 0's commands."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from engine.device import resolve_device
from engine.parallel.link import Link, say_hello
from engine.parallel.process_ranks import join_ranks, join_store
from engine.parallel.protocol import (
    CLONE,
    CLOSE,
    DONE,
    DROP,
    FAILED,
    LAUNCH,
    READY,
    SAVE,
    SPILL,
    Ticket,
    packed,
    pages_in,
    unpacked,
)
from engine.parallel.ranks import RankGroup
from engine.parallel.wire import BatchDecoder
from engine.runner.protocol import Launch, Runner
from engine.settings import EngineSettings

RunnerMaker = Callable[[EngineSettings, RankGroup], Runner]
"""Makes a rank's runner. It must be importable by name, so that it can be passed to other processes. All ranks call it
at the same time, and its collectives must match."""

IDLE_S = 0.05
"""How long a launched step may wait without another command before its result is taken."""

ORPHAN_STATUS = 3

_logger = logging.getLogger("kedge.ranks")


def run_rank(ticket: Ticket, settings: EngineSettings, make_runner: RunnerMaker) -> None:
    """Serves as a rank until rank 0 closes, then returns. If rank 0 goes away, this process ends at once, whatever it
    is doing: it has no purpose left, and may hang in a collective. Raises what went wrong, after telling rank 0."""
    connected = socket.create_connection((ticket.host, ticket.command_port), ticket.timeouts.join_s)
    link = Link(connected, ticket.timeouts.step_s)
    say_hello(link, ticket.token, ticket.rank)
    closing = threading.Event()
    threading.Thread(target=_end_with, args=(link, closing), name="kedge-rank-watch", daemon=True).start()
    try:
        ranks = join_ranks(ticket, join_store(ticket), resolve_device(settings.model.device))
        ranks.bound(ticket.timeouts.start_s)
        runner = make_runner(settings, ranks)
        link.send(packed(READY, runner.facts))
        ranks.bound(ticket.timeouts.step_s)
        Follower(runner, link).run()
        closing.set()
    except BaseException as error:
        _logger.exception("rank %d failed", ticket.rank)
        closing.set()
        with suppress(OSError):
            link.send(packed(FAILED, f"{type(error).__name__}: {error}"))
        raise
    finally:
        link.close()


def _end_with(link: Link, closing: threading.Event) -> None:
    link.wait_gone()
    if not closing.is_set():
        os._exit(ORPHAN_STATUS)


class Follower:
    """The loop of commands. A failed copy is reported to rank 0; a failed step ends the rank."""

    def __init__(self, runner: Runner, link: Link) -> None:
        self._runner = runner
        self._link = link
        self._batches = BatchDecoder()
        self._launched: deque[Launch] = deque()
        self._sending = threading.Lock()  # copies end on threads of their own

    def run(self) -> None:
        number = 0
        while True:
            if self._launched and not self._link.poll(IDLE_S):
                self._finish(0)
            message = self._link.receive()
            if message is None:
                raise ConnectionError("rank 0 is gone")
            command, *parts = unpacked(message)
            number += 1
            if command == CLOSE:
                self._finish(0)
                self._runner.close()
                return
            self._carry_out(number, command, parts)

    def _carry_out(self, number: int, command: int, parts: list[object]) -> None:
        runner = self._runner
        match command, parts:
            case (int(kind), [tuple(batch)]) if kind == LAUNCH:
                self._launched.append(runner.launch(self._batches.decode(batch)))
                self._finish(1 if runner.facts.runs_ahead else 0)
            case (int(kind), [int(key)]) if kind == DROP:
                runner.drop(key)
            case (int(kind), [tuple(source), tuple(target)]) if kind == CLONE:
                runner.clone(pages_in(source), pages_in(target))
            case (int(kind), [int(source), int(key)]) if kind == SPILL:
                runner.spill(source, key).add_done_callback(partial(self._copied, number))
            case (int(kind), [int(key), tuple(pages)]):
                start = runner.save if kind == SAVE else runner.load
                start(key, pages_in(pages)).add_done_callback(partial(self._copied, number))
            case _:
                raise AssertionError(f"no such command: {command}")

    def _finish(self, most: int) -> None:
        """Takes results until at most `most` steps are in flight. A failure of one is this rank's failure."""
        while len(self._launched) > most:
            self._launched.popleft().result()

    def _copied(self, number: int, copy: Future[None]) -> None:
        error = copy.exception()
        reason = None if error is None else f"{type(error).__name__}: {error}"
        answer = packed(DONE, number, reason, error.errno if isinstance(error, OSError) else None)
        with self._sending:
            self._link.send(answer)
