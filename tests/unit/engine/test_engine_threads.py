"""The engine asked by many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.api import FinishReason
from engine.settings import SchedulerSettings
from tests.unit.engine.driver import VOCAB, request
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.null_runner import null_generate


@pytest.mark.usefixtures("ways_to_step")
def test_many_threads_at_once() -> None:
    """Four threads open, talk, abort, rewind, flush and close. Every turn is exact, and in the end the books are
    empty."""

    def talk(rig: Rig, number: int) -> int:
        name, history, done = f"s{number}", [], 0
        for turn in range(12):
            spec = request(
                f"{name}/{turn}", [1 + number, 2 + turn], 2 + turn % 5, session_id=name,
                history=list(history), history_len=len(history),
            )  # fmt: skip
            rig.submit(spec)
            if turn % 4 == 3:
                rig.engine.abort(spec.request_id)
            outcome = rig.wait(spec.request_id)[0]
            prompt = [*history, *spec.new_tokens]
            expected = null_generate(prompt, spec.sampling.max_new_tokens, VOCAB)
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            if outcome.reason is FinishReason.LENGTH:
                history = prompt + outcome.token_ids
                done += 1
            if turn % 5 == 4:
                history = history[: len(history) // 2]
                rig.engine.rewind_session(name, len(history)).result(WAIT_S)
            rig.engine.flush()
        rig.engine.close_session(name).result(WAIT_S)
        return done

    settings = SchedulerSettings(16, 8, 3)
    with running(num_pages=24, scheduler=settings) as rig, ThreadPoolExecutor(4) as pool:
        done = [pool.submit(talk, rig, number) for number in range(4)]
        assert all(future.result(60) >= 9 for future in done)
        assert rig.engine.flush().result(WAIT_S)
        report = rig.engine.audit().result(WAIT_S)
        assert report.clean, report
        assert report.pools["full"].free == 24
