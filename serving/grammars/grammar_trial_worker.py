"""The process behind serving/grammars/grammar_trial.py: compiles the grammars that it is given, one per line, within
its limits.

If it exceeds a limit, the process dies: that is the answer.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import threading
from pathlib import Path

from tokenizers import Tokenizer

from engine.api import ConstraintFailed
from serving.grammars.grammar_constraint import reason_of
from serving.grammars.grammar_trial import MEMORY_BYTES, STACK_BYTES
from serving.grammars.grammars import Grammars
from serving.wire.turns import OutputConstraint


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its input ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    head = json.loads(sys.stdin.readline())
    grammars = Grammars(Tokenizer.from_str(head["tokenizer"]), head["vocab_size"])
    _refusal(grammars, OutputConstraint("regex", "a"))
    _bound_memory()
    _say({"ready": True})
    for line in sys.stdin:
        _bound_time(head["cpu_s"])
        _say({"reason": _refusal(grammars, OutputConstraint(**json.loads(line)))})


def _refusal(grammars: Grammars, constraint: OutputConstraint) -> str | None:
    try:
        grammars.begin(grammars.compile(constraint))
    except (ValueError, ConstraintFailed) as error:
        return reason_of(str(error))
    except BaseException as error:  # a panic in llguidance is not an Exception
        return f"the compiler failed: {reason_of(str(error))}"
    return None


def _bound_memory() -> None:
    """Bounds memory beyond what is in use now. Only Linux says how much that is."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_time(cpu_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
