"""Log-probabilities of a session's history equal those of transformers, in float32, wherever they begin."""

from __future__ import annotations

import pytest
import torch

from engine.api import GenerateRequest, LogprobParams, SamplingParams, TokenDelta
from engine.assembly import assemble_engine
from engine.build_runner import build_runner
from engine.settings import CacheSettings, SchedulerSettings, SpeculationSettings
from tests.parity.matrix_cell import Scored
from tests.parity.test_matrix import WINDOW, assert_scored, make_models

TURNS = 4
LIMITS = SchedulerSettings(max_batch_tokens=48, chunk_size=7, max_running=4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "windowed"])
def test_every_position_asked_for_has_the_log_probability_of_one_pass_over_all(
    window: int | None, page_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = make_models(window, tmp_path_factory)
    settings = CacheSettings(page_size, 256 // page_size, window_ratio=1.0, books="strict")
    deltas: list[TokenDelta] = []
    runner = build_runner(models.target, settings, scheduler=LIMITS)
    engine = assemble_engine(
        runner, settings, LIMITS, SpeculationSettings(), frozenset(), lambda news: deltas.extend(news)
    )
    for start in (0, 1, 13, 37):
        history: list[int] = []
        session_id = f"from {start}"
        for turn in range(TURNS):
            prompt = [*history, *(3 + (5 * turn + start + k) % 20 for k in range(9))]
            first = min(start, len(prompt) - 1)
            deltas.clear()
            engine.submit(
                GenerateRequest(
                    f"{session_id}/{turn}", prompt[len(history) :], SamplingParams(6, temperature=0.0),
                    history=history, history_len=len(history), session_id=session_id,
                    logprobs=LogprobParams(input_start=first),
                )
            )  # fmt: skip
            engine._drain_inbox(block=False)
            while engine.step():
                pass
            assert deltas[-1].finish is not None
            scored = [entry for delta in deltas for entry in delta.input_logprobs]
            assert_scored(models.reference, [Scored(prompt, first, scored, session_id)])
            history = prompt + [token for delta in deltas for token in delta.token_ids]
        assert deltas[-1].prompt_tokens == len(history) - 6
        with torch.inference_mode():
            best = models.reference(torch.tensor([history])).logits[0].argmax(-1).tolist()
        assert history[-6:] == best[-7:-1], "the turn after the scored ones is the model's own"
    runner.close()
