"""Whether a grammar can be compiled within bounds, found out where nothing else is lost: in a process of its own.

llguidance bounds what most grammars may cost. Some schemas of a kilobyte take it minutes and all memory nevertheless,
in ways that cannot all be told from the text.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from dataclasses import asdict

from tokenizers import Tokenizer

from serving.turns import OutputConstraint

CPU_S = 2
MEMORY_BYTES = 512 * 2**20
STACK_BYTES = 4 * 2**20
"""Half of what the replica's thread has."""

ANSWER_TIMEOUT_S = 30.0
"""On a machine that has no CPU for it. Its start takes longest."""

TOO_MUCH = (
    f"compiling it takes more than {CPU_S} s, {MEMORY_BYTES >> 20} MiB, or {STACK_BYTES >> 20} MiB of stack"
)


class GrammarTrial:
    """Used on one thread. The process starts with the first trial, and anew after one that was too much for it. It ends
    with this object, or with the process that has it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._head = {"tokenizer": tokenizer.to_str(), "vocab_size": vocab_size}
        self._worker: _Worker | None = None

    def refusal(self, constraint: OutputConstraint) -> str | None:
        """Why it cannot be compiled; None if it can."""
        if self._worker is None or not self._worker.alive:
            self._worker = _Worker()
            self._worker.ask(self._head)
        answer = self._worker.ask(asdict(constraint))
        if answer is None:
            self._worker = None
            return TOO_MUCH
        return None if answer["reason"] is None else str(answer["reason"])


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.grammar_trial_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: object) -> dict[str, object] | None:
        """None, and the end of it, if it gives no answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            answer: dict[str, object] = json.loads(self._line())
        except (OSError, EOFError, TimeoutError):
            self._end()
            return None
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line, deadline_s = b"", time.monotonic() + ANSWER_TIMEOUT_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], deadline_s - time.monotonic())
            if not ready:
                raise TimeoutError
            piece = os.read(self._process.stdout.fileno(), 65_536)
            if not piece:
                raise EOFError
            line += piece
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
