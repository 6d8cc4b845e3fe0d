"""The draft model proposes what it would say by itself, and never changes what the target says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.attention.torch_backend import TorchAttention
from engine.batch import BatchItem, DraftWork, ItemOutput, SampleSpec, ScheduledBatch
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.runner.draft_model import DraftModel
from engine.runner.kv_pool import KVPool, make_kv_pool
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ModelSettings

VOCAB = 70
PAGE_SIZE = 4
PAGES_EACH = 16
CACHE = CacheSettings(PAGE_SIZE, 3 * PAGES_EACH)
GREEDY = SamplingParams(temperature=0.0)
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
SMALL = {**TARGET, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def load(folder: Path, config: dict[str, Any], seed: int) -> tuple[LoadedModel, KVPool]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(ModelSettings(str(folder), load_format="dummy", device="cpu", seed=seed))
    return loaded, make_kv_pool(loaded.layout, CACHE, loaded.dtype, loaded.device)


def make_draft(folder: Path, config: dict[str, Any], seed: int = 1) -> DraftModel:
    loaded, pool = load(folder, config, seed)
    return DraftModel(loaded.model, pool, TorchAttention(pool), loaded.max_context_len)


def test_rehearsals_leave_nothing(tmp_path: Path) -> None:
    """On a GPU they compile its kernels before the first request, and may fill the whole pool."""
    fresh, rehearsed = make_draft(tmp_path / "a", SMALL), make_draft(tmp_path / "b", SMALL)
    for num_tokens, longest in ((1, 1), (7, 1), (10, 4), (10_000, 10_000)):
        rehearsed.rehearse(num_tokens, longest)
    pages = np.arange(PAGES_EACH, dtype=np.int32)
    tokens = [5, 3, 8, 1]
    asked = BatchItem("a", tokens, 0, pages, True, SampleSpec(GREEDY), draft=DraftWork(0, tokens, 4))
    with torch.inference_mode():
        assert rehearsed.propose([asked]) == fresh.propose([asked])


def make_runner(tmp_path: Path, draft: DraftModel | None) -> TorchRunner:
    loaded, pool = load(tmp_path / "target", TARGET, 1)
    return TorchRunner(
        loaded.model, pool, TorchAttention(pool), loaded.vocab_size, loaded.max_context_len, draft
    )


def item(index: int, tokens: list[int], start: int, draft: DraftWork | None = None) -> BatchItem:
    pages = np.arange(index * PAGES_EACH, (index + 1) * PAGES_EACH, dtype=np.int32)
    spec = SampleSpec(GREEDY, logprobs=True)
    return BatchItem(str(index), tokens, start, pages, True, spec, draft=draft)


def run(runner: TorchRunner, *items: BatchItem) -> list[ItemOutput]:
    return runner.execute(ScheduledBatch(list(items))).items


def prompt(index: int) -> list[int]:
    return np.random.default_rng(index).integers(0, VOCAB, 6 + 3 * index).tolist()


def mirrored(index: int, tokens: list[int], count: int, draft_start: int = 0) -> BatchItem:
    """An item in which the target computes the last of `tokens`, and the draft model all tokens from `draft_start`
    on."""
    work = DraftWork(draft_start, tokens[draft_start:], count)
    return item(index, tokens[-1:], len(tokens) - 1, work)


def greedy(runner: TorchRunner, index: int, tokens: list[int], count: int) -> list[int]:
    """`tokens`, followed by `count` tokens that the runner picks one by one."""
    new, start = tokens, 0
    for _ in range(count):
        token = run(runner, item(index, new, start))[0].token_ids[0]
        start, new, tokens = len(tokens), [token], [*tokens, token]
    return tokens


def test_proposals_are_its_own_greedy_tokens(tmp_path: Path) -> None:
    """With the target's weights it agrees in everything, whatever else is in the batch."""
    truth = [greedy(make_runner(tmp_path, None), 0, prompt(index), 20) for index in range(3)]
    draft = make_draft(tmp_path / "same", TARGET)
    runner = make_runner(tmp_path, draft)
    lens = [len(prompt(index)) for index in range(3)]
    for index in range(3):
        whole = item(index, prompt(index)[:-1], 0, DraftWork(0, prompt(index)[:-1], 0))
        whole.sample = None
        assert run(runner, whole) == [ItemOutput(())]
    draft_lens = [length - 1 for length in lens]
    for counts in ((3, 0, 1), (0, 4, 2), (2, 2, 5), (1, 6, 0)):
        items = [
            mirrored(i, truth[i][: lens[i]], counts[i], draft_lens[i]) if counts[i] or i != 1
            else item(i, truth[i][lens[i] - 1 : lens[i]], lens[i] - 1)  # asks nothing of the draft model
            for i in range(3)
        ]  # fmt: skip
        for index, output in enumerate(run(runner, *items)):
            assert output.num_proposed == counts[index]
            expected = truth[index][lens[index] : lens[index] + counts[index] + 1]
            assert list(output.token_ids) == expected
            assert len(output.logprobs) == counts[index] + 1
            if items[index].draft is not None:
                draft_lens[index] = lens[index] + max(0, counts[index] - 1)
            lens[index] += counts[index] + 1


def test_it_runs_in_inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model over the bridge has parameters with gradients. Outside this mode each of its proposals would fail, and
    its pool would keep a graph of all writes."""
    draft = make_draft(tmp_path / "small", SMALL)
    forward, modes = draft._model.forward, list[bool]()

    def noted(*inputs: Any) -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return forward(*inputs)

    monkeypatch.setattr(draft._model, "forward", noted)
    runner = make_runner(tmp_path, draft)
    runner.rehearse_drafts(6, 3)
    assert run(runner, mirrored(0, prompt(0), 3))[0].num_proposed == 3
    assert modes == [True] * 4


def test_another_model_changes_no_token(tmp_path: Path) -> None:
    truth = greedy(make_runner(tmp_path, None), 0, prompt(2), 12)
    runner = make_runner(tmp_path, make_draft(tmp_path / "small", SMALL, seed=9))
    tokens, draft_len = prompt(2), 0
    run(runner, item(0, tokens[:-1], 0))
    while len(tokens) < len(truth):
        output = run(runner, mirrored(0, tokens, 3, draft_len))[0]
        assert output.num_proposed == 3
        draft_len = len(tokens)
        tokens = [*tokens, *output.token_ids]
    assert tokens[: len(truth)] == truth


def test_silent_past_its_own_context(tmp_path: Path) -> None:
    short = {**TARGET, "max_position_embeddings": 16}
    runner = make_runner(tmp_path, make_draft(tmp_path / "short", short))
    tokens = [3, 4, 5] * 5
    run(runner, item(0, tokens[:-1], 0))
    # The proposal after the last token of the draft model's context needs no KV.
    assert run(runner, mirrored(0, tokens, 5))[0].num_proposed == 2
    longer = [*tokens, 1, 2, 3]
    run(runner, item(0, longer[len(tokens) - 1 : -1], len(tokens) - 1))
    assert run(runner, mirrored(0, longer, 5, len(tokens)))[0].num_proposed == 0
    assert run(runner, mirrored(0, longer, 5, len(longer) - 1))[0].num_proposed == 0


def test_a_draft_model_has_no_windows(tmp_path: Path) -> None:
    windowed = {**TARGET, "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    with pytest.raises(UnsupportedModel, match="window"):
        make_draft(tmp_path / "window", windowed)


def test_a_page_counts_both_models(tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "small", SMALL)
    alone, both = make_runner(tmp_path, None), make_runner(tmp_path, draft)
    assert both.facts.page_size_bytes == alone.facts.page_size_bytes + draft.kv.page_size_bytes
    assert draft.kv.page_size_bytes == PAGE_SIZE * 2 * 2 * 8 * torch.float32.itemsize
