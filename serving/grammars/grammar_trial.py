"""Finds out whether a grammar can be compiled within bounds, in a separate process that may die of it.

llguidance bounds what most grammars may cost. Nevertheless some schemas of a kilobyte take it minutes and all memory,
in ways that cannot all be recognised from the text.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref

from msgspec.structs import asdict
from tokenizers import Tokenizer

from serving.wire.errors import unavailable
from serving.wire.turns import OutputConstraint, ServiceError

CPU_S = 2
MEMORY_BYTES = 512 * 2**20
STACK_BYTES = 4 * 2**20
"""Half of the stack that the replica's thread has."""

ANSWER_TIMEOUT_S = 30.0
"""For a machine that has no CPU time left for the process. The start takes longest."""

TOO_MUCH = (
    f"compiling it takes more than {CPU_S} s, {MEMORY_BYTES >> 20} MiB, or {STACK_BYTES >> 20} MiB of stack"
)
UNKNOWN = unavailable("the process that tries grammars does not answer")


class GrammarTrial:
    """Used on one thread. The process starts with the first trial, and again after a trial that was too much for it. It
    ends with this object, or with the process that owns this object."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._head = {"tokenizer": tokenizer.to_str(), "vocab_size": vocab_size, "cpu_s": CPU_S}
        self._worker: _Worker | None = None

    def refusal(self, constraint: OutputConstraint) -> str | None:
        """Why the constraint cannot be compiled; None if it can. Raises ServiceError if that cannot be found out
        now."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.alive:
            worker = self._started()
        try:
            answer = worker.ask(asdict(constraint))
        except EOFError:
            worker.end()
            return TOO_MUCH
        except (OSError, TimeoutError) as error:
            worker.end()
            raise ServiceError(UNKNOWN) from error
        self._worker = worker
        return None if answer["reason"] is None else str(answer["reason"])

    def _started(self) -> _Worker:
        worker = _Worker()
        try:
            worker.ask(self._head)
        except (EOFError, OSError, TimeoutError) as error:
            worker.end()
            raise ServiceError(UNKNOWN) from error
        return worker


class _Worker:
    """The process and its pipes. No wait on them takes longer than ANSWER_TIMEOUT_S."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.grammars.grammar_trial_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        self.end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: object) -> dict[str, object]:
        """Raises EOFError if the process died over the question, BrokenPipeError if it died before, TimeoutError."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        left = memoryview(json.dumps(question).encode() + b"\n")
        while left:
            _wait(self._to, select.POLLOUT, deadline_s)
            left = left[os.write(self._to, left) :]
        line = b""
        while not line.endswith(b"\n"):
            _wait(self._from, select.POLLIN, deadline_s)
            piece = os.read(self._from, 65_536)
            if not piece:
                raise EOFError
            line += piece
        answer: dict[str, object] = json.loads(line)
        return answer


def _wait(pipe: int, event: int, deadline_s: float) -> None:
    poller = select.poll()
    poller.register(pipe, event)
    if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
