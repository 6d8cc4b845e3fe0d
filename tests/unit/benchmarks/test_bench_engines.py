"""The engines of the card report share one model in memory. Also its bytes, and what counts as decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.decode import DRY_ONE, Load, decode, steady
from benchmarks.gpu.engines import Bench, Watch
from engine.settings import ExecutionSettings, SchedulerSettings

pytestmark = pytest.mark.slow


def test_engines_share_the_weights_that_transformers_gets(tmp_path: Path) -> None:
    bench = Bench("tiny", torch.device("cpu"), tmp_path)
    models = []
    for decode_steps in (1, 4):
        watch = Watch()
        execution = ExecutionSettings(decode_steps=decode_steps)
        with bench.engine(watch, 512, execution, SchedulerSettings()) as engine:
            result = decode(engine, watch, DRY_ONE, seed=3)
            models.append(engine._runner._model)  # type: ignore[attr-defined]
        assert result.tokens_per_s > 0
        assert len(watch.tokens) == 1
    assert models[0] is models[1]
    decoder = getattr(models[0], "_decoder", models[0])  # with compiled kernels, they run the decoder
    assert torch.equal(decoder._embedding_VE, bench.weights().take("model.embed_tokens.weight"))


def test_bytes_of_the_published_shape(tmp_path: Path) -> None:
    """Llama 3.1 has 8.03 B parameters. A step reads all but the 0.53 B of the embedding table. A token has 131 kB of KV
    in bfloat16."""
    bench = Bench("8b", torch.device("cpu"), tmp_path)
    parameters = 8_030_261_248 - 128_256 * 4096
    assert bench.weight_bytes == parameters * bench.dtype.itemsize
    assert bench.kv_token_bytes == 32 * 2 * 8 * 128 * bench.dtype.itemsize


def test_prompts_are_not_in_the_rate() -> None:
    watch = Watch()
    watch.times_s = {"early": [1.0, 2.0, 3.0, 4.0, 5.0], "late": [3.0, 4.0, 5.0, 6.0, 7.0]}
    result = steady(watch, ["early", "late"], Load(2, 10, 5))
    assert result.seconds == pytest.approx(2.0)
    assert result.tokens_per_s == pytest.approx(4 / 2.0)
    assert result.step_s == pytest.approx(1.0)
    assert result.context_len == pytest.approx(10 + (3 + 4 + 1 + 2) / 4)
    with pytest.raises(ValueError, match="decoded together"):
        steady(
            replace(watch, times_s={"early": [1.0, 2.0], "late": [2.0, 3.0]}),
            ["early", "late"],
            Load(2, 10, 2),
        )
