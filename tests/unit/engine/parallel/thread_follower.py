"""Rank 0 and its followers in one process: real links between threads, runners of any kind, no collectives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.batch import ModelOutput, ScheduledBatch
from engine.parallel.follow import Follower
from engine.parallel.lead import LeadRunner, lead
from engine.parallel.link import Link
from engine.parallel.process_ranks import ProcessRanks
from engine.parallel.protocol import FAILED, READY, Timeouts, packed
from engine.parallel.team import RankProcess, Team
from engine.runner.protocol import Launch, Runner
from tests.unit.engine.null_runner import NullRunner

WAIT_S = 30.0
"""How long a test waits for something that must happen at once."""
PATIENT = Timeouts(start_s=WAIT_S, join_s=WAIT_S, step_s=WAIT_S, stop_s=WAIT_S)


def linked_pair(send_timeout_s: float = WAIT_S) -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Link(near, send_timeout_s), Link(far, send_timeout_s)


class NoCollectives(ProcessRanks):
    """Ranks without collectives. Counts the calls of `abort`."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.aborts = 0, size, 0

    def bound(self, timeout_s: float) -> None:
        pass

    def abort(self) -> None:
        self.aborts += 1


class RecordingRunner(NullRunner):
    """A NullRunner that keeps the output of every step."""

    def launch(self, batch: ScheduledBatch) -> Launch:
        launch = super().launch(batch)
        self.outputs = [*getattr(self, "outputs", []), launch]
        return launch

    def given(self) -> list[ModelOutput]:
        return [launch.result() for launch in self.outputs]


class FollowerThread:
    """A RankProcess that runs engine.parallel.follow.Follower on a thread."""

    def __init__(self, runner: Runner, link: Link) -> None:
        self.link = link
        self.killed = False
        self._runner = runner
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ended(self) -> str | None:
        return None if self.thread.is_alive() else "ended"

    def kill(self) -> None:
        self.killed = True
        self.link.close()

    def _run(self) -> None:
        try:
            self.link.send(packed(READY, self._runner.facts))
            Follower(self._runner, self.link).run()
        except Exception as error:
            if not self.killed:
                self.link.send(packed(FAILED, str(error)))
        finally:
            self.link.close()


@contextmanager
def led(
    runner: Runner, *followers: Runner, timeouts: Timeouts = PATIENT
) -> Iterator[tuple[LeadRunner, Team, list[FollowerThread]]]:
    pairs = [linked_pair() for _ in followers]
    threads = [FollowerThread(own, far) for own, (_, far) in zip(followers, pairs, strict=True)]
    processes: list[RankProcess] = list(threads)
    team = Team(NoCollectives(1 + len(followers)), [near for near, _ in pairs], processes, timeouts)
    leading = lead(runner, team)
    assert isinstance(leading, LeadRunner)
    try:
        yield leading, team, threads
    finally:
        leading.close()
        for thread in threads:
            thread.thread.join(WAIT_S)
            assert not thread.thread.is_alive()
