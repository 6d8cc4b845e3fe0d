"""NullRunner: tokens are predictable, and broken books cause an error."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from cache.tiers import PoolPages
from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner, null_generate

VOCAB = 97


def make_item(
    tokens: list[int], start: int, pages: list[int], *, sample: bool = True, seed: int | None = None
) -> BatchItem:
    params = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed)
    spec = SampleSpec(params) if sample else None
    ascending = bool((np.diff(pages) == 1).all())
    return BatchItem("r", tokens, start, np.asarray(pages, dtype=np.int32), ascending, spec)


def make_runner(page_size: int = 4, **options: float | bool) -> NullRunner:
    return NullRunner(16, page_size, VOCAB, 64, **options)  # type: ignore[arg-type]


def run_one(runner: NullRunner, item: BatchItem) -> tuple[int, ...]:
    return runner.execute(ScheduledBatch([item])).items[0].token_ids


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_and_decode_match_the_oracle(page_size: int) -> None:
    runner = make_runner(page_size)
    pages = [9, 3, 12, 1, 0, 5, 7, 2, 4, 6, 8, 10]
    prompt = [5, 6, 7, 8, 9]
    assert run_one(runner, make_item(prompt[:2], 0, pages, sample=False)) == ()
    produced = list(run_one(runner, make_item(prompt[2:], 2, pages)))
    for _ in range(5):
        start = len(prompt) + len(produced) - 1
        produced += run_one(runner, make_item(produced[-1:], start, pages))
    assert produced == null_generate(prompt, 6, VOCAB)
    assert EOS_TOKEN_ID not in produced


def test_seed_changes_sampled_tokens_only() -> None:
    greedy = null_generate([1, 2], 8, VOCAB)
    assert null_generate([1, 2], 8, VOCAB, params=SamplingParams(seed=3)) != greedy
    assert null_generate([1, 2], 8, VOCAB, params=SamplingParams(temperature=0.0, seed=3)) == greedy


def test_overwritten_page_changes_the_next_token() -> None:
    runner = make_runner()
    run_one(runner, make_item([1, 2, 3, 4], 0, [0, 1]))
    run_one(runner, make_item([9, 9, 9, 9], 0, [0]))
    assert run_one(runner, make_item([5], 4, [0, 1])) != tuple(null_generate([1, 2, 3, 4, 5], 1, VOCAB))


def test_poison_names_page_and_position() -> None:
    runner = make_runner()
    run_one(runner, make_item([1, 2, 3, 4], 0, [7, 2]))
    with pytest.raises(AssertionError, match="position 4 reads page 2"):
        run_one(runner, make_item([6], 5, [7, 2]))
    runner.forget([7])
    with pytest.raises(AssertionError, match="position 0 reads page 7"):
        run_one(runner, make_item([5, 6], 4, [7, 2]))


def test_false_contiguity_and_short_page_tables_are_refused() -> None:
    runner = make_runner()
    item = make_item([1] * 8, 0, [3, 1])
    item.contiguous = True
    with pytest.raises(AssertionError, match="ascending"):
        run_one(runner, item)
    with pytest.raises(AssertionError, match="1 pages for 8 tokens"):
        run_one(runner, make_item([1] * 8, 0, [3]))


def test_eos_probability() -> None:
    ended = [null_generate([n], 1, VOCAB, eos_probability=0.25) == [EOS_TOKEN_ID] for n in range(1, 2000)]
    assert 0.2 < sum(ended) / len(ended) < 0.3


def test_input_logprobs_cover_the_positions_asked_for() -> None:
    runner = make_runner()
    item = make_item([5, 6, 7], 0, [0, 1], sample=False)
    item.input_logprobs_from, item.next_token = 0, 8
    out = runner.execute(ScheduledBatch([item])).items[0].input_logprobs
    assert [entry.token_id for entry in out] == [5, 6, 7, 8]
    assert out[0].logprob is None
    item = make_item([8, 9], 3, [0, 1])
    item.input_logprobs_from = 4
    out = runner.execute(ScheduledBatch([item])).items[0].input_logprobs
    assert [entry.token_id for entry in out] == [9]


def test_needs_no_torch() -> None:
    code = "import sys, tests.unit.engine.null_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("eos_probability", [0.0, 0.05])
def test_without_poison_tokens_are_the_same_and_a_decode_reads_no_sequence(
    eos_probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, rewinds into a sequence, sampled requests on shared pages, and copies to the host and back."""
    rng = random.Random(3)
    runner = make_runner(eos_probability=eos_probability, poison=False)
    reads: list[int] = []
    read = NullRunner._read

    def counting(runner: NullRunner, item: BatchItem, end: int):  # type: ignore[no-untyped-def]
        reads.append(end)
        return read(runner, item, end)

    monkeypatch.setattr(NullRunner, "_read", counting)
    pages = [3, 1, 7, 5, 11, 9, 0, 2, 12, 14]
    tokens = [rng.randrange(VOCAB) for _ in range(5)]
    (picked,) = run_one(runner, make_item(tokens, 0, pages))
    for _ in range(300):
        seed = 4 if rng.random() < 0.1 else None
        params = None if seed is None else SamplingParams(seed=seed)
        if len(tokens) > 34 or rng.random() < 0.1:
            keep = rng.randrange(1, len(tokens))
            del tokens[keep:]
            picked = rng.randrange(VOCAB)
        if rng.random() < 0.05:
            whole = PoolPages(np.array(pages, dtype=np.int32), np.array([], dtype=np.int32))
            runner.save(1, whole)
            runner.forget(pages)
            runner.load(1, whole)
            runner.drop(1)
        start = len(tokens)
        tokens += [picked] if rng.random() < 0.8 else [picked, 5, 6]
        (picked,) = run_one(runner, make_item(tokens[start:], start, pages, seed=seed))
        assert [picked] == null_generate(tokens, 1, VOCAB, eos_probability=eos_probability, params=params)
    assert len(reads) < 200
    reads.clear()
    for _ in range(3):
        start = len(tokens)
        tokens.append(picked)
        (picked,) = run_one(runner, make_item([tokens[-1]], start, pages))
    assert len(reads) <= 1
