"""The process that tries grammars: what ends the process fails only that grammar, and it ends with its owner."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving.grammars import grammar_trial
from serving.grammars.grammar_trial import TOO_MUCH, GrammarTrial
from serving.wire.turns import OutputConstraint, ServiceError
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

GOOD = OutputConstraint("regex", "a+")
BAD = OutputConstraint("regex", "(")
FOR_EVER = OutputConstraint("json_schema", json.dumps({"multipleOf": 999_983}))


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> GrammarTrial:
    monkeypatch.setattr(grammar_trial, "CPU_S", 1)
    return GrammarTrial(byte_level_tokenizer().backend_tokenizer, 1000)


def pid_of(trial: GrammarTrial) -> int:
    assert trial._worker is not None
    return trial._worker._process.pid


def test_a_process_for_all_trials_that_ends_with_its_owner() -> None:
    trial = GrammarTrial(byte_level_tokenizer().backend_tokenizer, 1000)
    assert trial.refusal(GOOD) is None
    pid = pid_of(trial)
    assert "unclosed group" in str(trial.refusal(BAD))
    assert trial.refusal(GOOD) is None
    assert pid_of(trial) == pid
    assert trial._worker is not None
    process = trial._worker._process
    del trial
    gc.collect()
    assert process.poll() is not None


def test_what_ends_it_costs_that_grammar_alone(trial: GrammarTrial) -> None:
    assert trial.refusal(GOOD) is None
    pid = pid_of(trial)
    assert trial.refusal(FOR_EVER) == TOO_MUCH
    assert trial.refusal(GOOD) is None
    assert pid_of(trial) != pid


def freeze(pid: int) -> None:
    """Stops the process and waits until it stands still: a signal takes a moment, and an answer could still come."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.001)


def test_one_that_died_in_between_is_replaced(trial: GrammarTrial) -> None:
    assert trial.refusal(GOOD) is None
    os.kill(pid_of(trial), signal.SIGKILL)
    while trial._worker is not None and trial._worker.alive:
        time.sleep(0.01)
    assert trial.refusal(GOOD) is None


@pytest.mark.parametrize("constraint", [GOOD, OutputConstraint("regex", "日" * 60_000)])
def test_a_frozen_one_is_not_waited_for_without_end(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch, constraint: OutputConstraint
) -> None:
    """A frozen process does not count against the grammar. The second grammar is larger than a pipe's buffer."""
    assert trial.refusal(GOOD) is None
    freeze(pid_of(trial))
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "ANSWER_TIMEOUT_S", 0.2)
        with pytest.raises(ServiceError) as caught:
            trial.refusal(constraint)
    assert (caught.value.info.status, caught.value.info.code) == (503, "replica_unavailable")
    assert trial.refusal(GOOD) is None


def test_one_that_cannot_start_says_nothing_of_the_grammar(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ServiceError):
            trial.refusal(GOOD)
    assert trial.refusal(GOOD) is None


def test_it_ends_with_a_process_that_is_killed() -> None:
    script = """if True:
        import os, sys
        from tests.unit.serving.small_tokenizer import byte_level_tokenizer
        from serving.grammars.grammar_trial import GrammarTrial
        from serving.wire.turns import OutputConstraint, ServiceError
        trial = GrammarTrial(byte_level_tokenizer().backend_tokenizer, 1000)
        assert trial.refusal(OutputConstraint("regex", "a")) is None
        print(trial._worker._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert ran.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{int(ran.stdout)}/cmdline").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
