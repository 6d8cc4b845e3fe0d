"""The cache's orders, carried out: the runner copies beside the steps, and the cache hears of each end between two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from cache.session_tiers import SessionTiers
from cache.tiers import CopyKind, CopyOrder
from engine.api import EngineStopped
from engine.runner.protocol import Runner

_logger = logging.getLogger("kedge.engine")


class Copies:
    """Between the cache's tiers and the runner, both of which are the step thread's. `post` has it run a command; what
    is posted too late (EngineStopped) is nobody's concern."""

    def __init__(
        self, tiers: SessionTiers, runner: Runner, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._tiers = tiers
        self._runner = runner
        self._post = post

    def carry_out(self) -> None:
        """Hands new orders to the runner, before anything is written to the pages that they read."""
        for order in self._tiers.take_orders():
            if order.kind is CopyKind.DROP:
                self._runner.drop(order.key)
            elif order.kind is CopyKind.CLONE:
                assert order.pages is not None
                assert order.target is not None
                self._runner.clone(order.pages, order.target)
            else:
                self._start(order).add_done_callback(partial(self._ended, order.key))

    def _start(self, order: CopyOrder) -> Future[None]:
        if order.kind is CopyKind.SPILL:
            return self._runner.spill(order.source, order.key)
        assert order.pages is not None
        start = self._runner.save if order.kind is CopyKind.SAVE else self._runner.load
        return start(order.key, order.pages)

    def _ended(self, key: int, copy: Future[None]) -> None:
        """On whatever thread copied."""
        with suppress(EngineStopped):
            self._post(partial(self._report, key, copy.exception()))

    def _report(self, key: int, error: BaseException | None) -> None:
        """A disk that fails may do so at every session: it is logged once, then only counted."""
        failures = self._tiers.num_disk_failures
        self._tiers.copy_done(key, failed=error is not None)
        if error is None:
            return
        if self._tiers.num_disk_failures == failures:
            _logger.error("a copy of KV between device and host failed", exc_info=error)
        elif failures == 0:
            _logger.error("KV could not be written to disk or read from it; from now on this is only counted",
                          exc_info=error)  # fmt: skip
