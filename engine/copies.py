"""Carries out the cache's copy orders. The runner copies beside the steps; the cache is told of each end between two
steps."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from cache.disk_reads import READ_PATIENCE_S
from cache.session_tiers import SessionTiers
from cache.tiers import CopyKind, CopyOrder
from engine.api import EngineStopped
from engine.runner.protocol import Runner

_logger = logging.getLogger("kedge.engine")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Copies:
    """Connects the cache's tiers with the runner; the step thread owns both. `post` makes that thread run a command.
    Commands posted too late (EngineStopped) are dropped."""

    def __init__(
        self, tiers: SessionTiers, runner: Runner, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._tiers = tiers
        self._runner = runner
        self._post = post
        self._disk_error_logged = False

    @property
    def patience_s(self) -> float | None:
        """Seconds until `give_up_reads` gives up, if no read ends before. None: there is nothing to give up."""
        return self._tiers.reads.patience_s

    def give_up_reads(self) -> None:
        """Call it before a step is planned: turns do not wait for ever for a disk that hangs."""
        if self._tiers.give_up_reads():
            _logger.error(
                "no KV came from disk for %.0f s; what was to be read is computed again", READ_PATIENCE_S
            )

    def carry_out(self) -> None:
        """Hands new orders to the runner. Call it before anything is written to the pages that they read."""
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
        """Runs on the thread that copied."""
        with suppress(EngineStopped):
            self._post(partial(self._report, key, copy.exception()))

    def _report(self, key: int, error: BaseException | None) -> None:
        """Tells the cache, and logs errors. A failing disk may fail for every session: that is logged once, then only
        counted."""
        failures = self._tiers.num_disk_failures
        disk_full = isinstance(error, OSError) and error.errno in _NO_SPACE
        self._tiers.copy_done(key, failed=error is not None, disk_full=disk_full)
        if error is None:
            return
        if self._tiers.num_disk_failures == failures:
            _logger.error("a copy of KV between device and host failed", exc_info=error)
        elif not self._disk_error_logged:
            self._disk_error_logged = True
            _logger.error("KV could not be written to disk or read from it; from now on this is only counted",
                          exc_info=error)  # fmt: skip
