"""The runner as the scheduler uses it: an item's result depends neither on its batch mates nor on how it was cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.api import SamplingParams, TokenLogprob
from engine.attention.torch_backend import TorchAttention
from engine.batch import BatchItem, ItemOutput, SampleSpec, ScheduledBatch
from engine.models.linear import LinearFactory, PlainLinear
from engine.models.loader import load_model
from engine.runner.kv_pool import make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ModelSettings
from tests.unit.engine.attention.reference import ReferenceAttention

VOCAB = 90
PAGES_EACH = 10
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def make_runner(
    directory: Path, make_linear: LinearFactory | None = None, reference: bool = False
) -> TorchRunner:
    settings = ModelSettings(str(directory), load_format="dummy", device="cpu", seed=5)
    loaded = load_model(settings, make_linear)
    pool = make_kv_pool(loaded.layout, CacheSettings(4, 6 * PAGES_EACH), loaded.dtype, loaded.device)
    attention = ReferenceAttention(pool) if reference else TorchAttention(pool)
    return TorchRunner(loaded.model, pool, attention, VOCAB, loaded.max_context_len)


def item(index: int, tokens: list[int], start: int, params: SamplingParams | None) -> BatchItem:
    pages = np.arange(index * PAGES_EACH, (index + 1) * PAGES_EACH, dtype=np.int32)
    spec = None
    if params is not None:
        spec = SampleSpec(params, logprobs=True, top_logprobs=3)
    return BatchItem(str(index), tokens, start, pages, True, spec)


def run(runner: TorchRunner, *items: BatchItem) -> list[ItemOutput]:
    return runner.execute(ScheduledBatch(list(items))).items


def prompt(index: int) -> list[int]:
    return np.random.default_rng(index).integers(0, VOCAB, 5 + 4 * index).tolist()


def values(scored: tuple[TokenLogprob, ...]) -> list[float]:
    return [entry.logprob for entry in scored if entry.logprob is not None]


def test_batch_mates_change_nothing(directory: Path) -> None:
    params = [SamplingParams(temperature=1.2, seed=index) for index in range(4)]
    params[2] = SamplingParams(temperature=0.0)
    together = run(make_runner(directory), *(item(i, prompt(i), 0, params[i]) for i in range(4)))
    for index in (3, 1, 0, 2):
        alone = run(make_runner(directory), item(index, prompt(index), 0, params[index]))[0]
        assert alone.token_ids == together[index].token_ids
        assert values(alone.logprobs) == pytest.approx(values(together[index].logprobs), abs=1e-5)


def test_cuts_change_nothing(directory: Path) -> None:
    """One prompt whole, and in chunks beside a decode. The chunks' input log-probabilities join without gap or
    overlap."""
    tokens, params = prompt(3), SamplingParams(temperature=0.8, seed=9)
    whole = item(0, tokens, 0, params)
    whole.input_logprobs_from = 0
    expected = run(make_runner(directory), whole)[0]
    runner, scored = make_runner(directory), []
    for begin in range(0, len(tokens), 6):
        chunk = tokens[begin : begin + 6]
        last = begin + len(chunk) == len(tokens)
        part = item(0, chunk, begin, params if last else None)
        part.input_logprobs_from = 0
        part.next_token = None if last else tokens[begin + 6]
        mate = item(1, [3], begin // 6, SamplingParams(temperature=0.0))
        got = run(runner, mate, part)[1]
        scored += got.input_logprobs
    assert got.token_ids == expected.token_ids
    assert [entry.token_id for entry in scored] == tokens
    assert scored[0].logprob is None
    assert values(tuple(scored)) == pytest.approx(values(expected.input_logprobs), abs=1e-5)


def test_input_logprobs_from_the_middle(directory: Path) -> None:
    tokens = prompt(2)
    part = item(0, tokens, 0, None)
    part.input_logprobs_from, part.top_input_logprobs = 4, 2
    got = run(make_runner(directory), part)[0]
    assert got.token_ids == ()
    assert [entry.token_id for entry in got.input_logprobs] == tokens[4:]
    assert all(len(entry.top) == 2 and entry.logprob is not None for entry in got.input_logprobs)
    assert all(entry.top[0][1] >= (entry.logprob or 0.0) for entry in got.input_logprobs)


def decode(runner: TorchRunner, params: SamplingParams, count: int) -> list[int]:
    """The prompt and `count` tokens after it, one token a step."""
    tokens = prompt(2)
    new, start = tokens, 0
    while len(tokens) < len(prompt(2)) + count:
        new, start = list(run(runner, item(0, new, start, params))[0].token_ids), len(tokens)
        tokens = tokens + new
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_change_no_token(directory: Path, temperature: float) -> None:
    """Right and wrong drafts, beside a prompt chunk. Later tokens overwrite what a rejected draft wrote."""
    params = SamplingParams(temperature=temperature, seed=11)
    expected = decode(make_runner(directory), params, 16)
    runner = make_runner(directory)
    tokens = expected[: len(prompt(2))]
    run(runner, item(0, tokens[:-1], 0, None))
    random = np.random.default_rng(1)
    for mate in range(6):
        truth = expected[len(tokens) : len(tokens) + 3]
        drafts = [token if random.random() < 0.7 else (token + 1) % VOCAB for token in truth]
        part = item(0, [tokens[-1], *drafts], len(tokens) - 1, params)
        part.num_drafts = len(drafts)
        part.sample = SampleSpec(params, logprobs=True)
        other = item(1, [7, 8], 2 * mate, None)
        other.input_logprobs_from, other.next_token = 0, 7
        outputs = run(runner, other, part)
        kept = next((i for i, (a, b) in enumerate(zip(drafts, truth, strict=True)) if a != b), len(truth))
        assert len(outputs[1].token_ids) == kept + 1 == len(outputs[1].logprobs)
        assert outputs[1].num_proposed == len(drafts)
        assert [entry.token_id for entry in outputs[0].input_logprobs][-2:] == [8, 7]
        tokens = tokens + list(outputs[1].token_ids)
    assert tokens[: len(expected)] == expected[: len(tokens)]


@pytest.mark.parametrize("plain", [True, False], ids=["plain linears", "fast linears"])
def test_fast_parts_equal_the_simple_ones(directory: Path, plain: bool) -> None:
    """Fast attention and fast linears, compared with the reference attention over torch's own linear."""
    greedy = SamplingParams(temperature=0.0)
    outputs = []
    for runner in (
        make_runner(directory, PlainLinear, reference=True),
        make_runner(directory, PlainLinear if plain else None),
    ):
        steps = run(runner, item(0, prompt(2), 0, greedy), item(1, prompt(1), 0, greedy))
        for step in range(3):
            last = [output.token_ids[0] for output in steps[-2:]]
            steps += run(
                runner,
                item(0, [last[0]], len(prompt(2)) + step, greedy),
                item(1, [last[1]], len(prompt(1)) + step, greedy),
            )
        outputs.append(steps)
    for simple, fast in zip(*outputs, strict=True):
        assert simple.token_ids == fast.token_ids
        assert values(simple.logprobs) == pytest.approx(values(fast.logprobs), abs=1e-4)


def test_sizes(directory: Path) -> None:
    runner = make_runner(directory)
    assert (runner.facts.num_pages, runner.facts.page_size) == (6 * PAGES_EACH, 4)
    assert runner.facts.page_size_bytes == 4 * 2 * 2 * 2 * 16 * 4
    assert (runner.facts.window_len, runner.facts.num_window_pages, runner.facts.window_page_size_bytes) == (
        None,
        0,
        0,
    )
    assert (runner.facts.vocab_size, runner.facts.max_context_len) == (VOCAB, 128)
    assert not torch.is_inference_mode_enabled()
