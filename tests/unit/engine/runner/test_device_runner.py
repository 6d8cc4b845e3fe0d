"""The GPU's runner: padded buffers, pending tokens and several steps at once give what plain steps give.

On a CPU, the functions that a GPU would capture are called each time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.attention.choose import choose_attention
from engine.attention.table_torch import TorchTables
from engine.batch import PENDING, BatchItem, SampleSpec, ScheduledBatch, SeenTokens
from engine.build_runner import StepLimits, careful_runner, device_runner
from engine.device import device_name, resolve_device
from engine.kernels.choose import choose_ops
from engine.models.loader import LoadedModel, load_model
from engine.models.protocol import CausalModel
from engine.parallel.ranks import OneRank
from engine.runner import device_runner as device_runner_module
from engine.runner.device_runner import DeviceRunner
from engine.runner.graphs import make_graphs
from engine.runner.kv_pool import make_kv_pool
from engine.runner.protocol import RunnerLost
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ExecutionSettings, ModelSettings

VOCAB = 90
PAGES_EACH = 10
PAGE_SIZE = 4
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
}
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=11)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    settings = ModelSettings(str(directory), load_format="dummy", dtype="float32", seed=5)
    return load_model(settings, ops=choose_ops(resolve_device("auto")))


class Recorded:
    """Graphs for a CPU. It always calls the captured function, whatever function it gets later. So anything that a
    capture leaves out is missing in every run."""

    replays = True

    def __init__(self) -> None:
        self.captured: dict[Hashable, Callable[[], None]] = {}
        self.runs: list[tuple[Hashable, bool]] = []

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        for _ in range(3):
            function()
        self.captured[key] = function

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        self.runs.append((key, key in self.captured))
        self.captured.get(key, function)()

    def close(self) -> None:
        self.captured.clear()


def make_pair(
    loaded: LoadedModel, max_graph_tokens: int = 8, *, graphs: bool = True, recorded: Recorded | None = None
) -> tuple[TorchRunner, DeviceRunner]:
    """The plain runner and the GPU's runner, each with a pool of its own."""
    execution = ExecutionSettings(graphs=graphs, max_graph_tokens=max_graph_tokens, decode_steps=4)
    runners: list[Any] = []
    for _ in range(2):
        pool = make_kv_pool(
            loaded.layout, CacheSettings(PAGE_SIZE, 6 * PAGES_EACH), loaded.dtype, loaded.device
        )
        choice = choose_attention("auto", pool, loaded.device)
        runners.append(careful_runner(loaded, pool, choice, None, execution))
    limits = StepLimits(rows=64, items=6, sampled=12, steps=4)
    made = recorded or make_graphs(loaded.device, wanted=graphs)
    runner = device_runner(loaded, runners[1], pool, choice, limits, made, execution, OneRank())
    runner.capture()
    return runners[0], runner


def item(
    index: int, tokens: list[int], start: int, params: SamplingParams | None, **options: Any
) -> BatchItem:
    pages = np.arange(index * PAGES_EACH, (index + 1) * PAGES_EACH, dtype=np.int32)[::-1].copy()
    logprobs = options.pop("logprobs", False)
    seen = options.pop("seen", None)
    spec = None
    if params is not None:
        spec = SampleSpec(params, seen, logprobs, 3 if logprobs else 0)
    return BatchItem(str(index), tokens, start, pages, False, spec, **options)


def prompts(count: int, length: int = 7) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCAB, length + index).tolist() for index in range(count)]


def both(pair: tuple[TorchRunner, DeviceRunner], items: list[BatchItem]) -> list[tuple[int, ...]]:
    """Runs the batch on both runners. Checks that they agree, and returns the tokens."""
    batch = ScheduledBatch(items)
    plain, device = (runner.launch(batch).result().items for runner in pair)
    assert [output.token_ids for output in device] == [output.token_ids for output in plain]
    assert [output.num_proposed for output in device] == [output.num_proposed for output in plain]
    for ours, theirs in zip(device, plain, strict=True):
        for entries in zip(
            (*ours.logprobs, *ours.input_logprobs), (*theirs.logprobs, *theirs.input_logprobs), strict=True
        ):
            assert entries[0].token_id == entries[1].token_id
            assert entries[0].logprob == pytest.approx(entries[1].logprob, abs=1e-4)
            assert [token for token, _ in entries[0].top] == [token for token, _ in entries[1].top]
    return [output.token_ids for output in device]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("graphs", [True, False], ids=["padded", "exact"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_extends_and_decodes_pick_what_a_plain_step_picks(
    loaded: LoadedModel, count: int, graphs: bool, params: SamplingParams
) -> None:
    pair = make_pair(loaded, graphs=graphs)
    texts = prompts(count)
    picks = both(pair, [item(i, text, 0, params) for i, text in enumerate(texts)])
    for _ in range(3):
        for text, pick in zip(texts, picks, strict=True):
            text.extend(pick)
        items = [item(i, text[-1:], len(text) - 1, params) for i, text in enumerate(texts)]
        picks = both(pair, items)


def test_a_mixed_step_of_chunks_decodes_and_drafts(loaded: LoadedModel) -> None:
    pair = make_pair(loaded, max_graph_tokens=32)
    texts = prompts(4)
    picks = both(pair, [item(i, text, 0, GREEDY) for i, text in enumerate(texts)])
    for text, pick in zip(texts, picks, strict=True):
        text.extend(pick)
    right = both(pair, [item(0, texts[0][-1:], len(texts[0]) - 1, GREEDY)])[0]
    items = [
        item(0, [texts[0][-1], right[0], 5, 6], len(texts[0]) - 1, GREEDY, num_drafts=3),
        item(1, texts[1][-1:], len(texts[1]) - 1, SAMPLED),
        item(2, [1, 2, 3], len(texts[2]) - 1, None, next_token=4),
        item(4, [7, 8, 9, 10, 11], 0, SAMPLED),
    ]
    accepted = both(pair, items)
    assert len(accepted[0]) in (2, 3)
    assert accepted[2] == ()


def test_a_step_of_prompt_chunks_alone_samples_nothing(loaded: LoadedModel) -> None:
    pair = make_pair(loaded)
    assert both(pair, [item(0, [1, 2, 3], 0, None, next_token=4)]) == [()]
    both(pair, [item(0, [4], 3, GREEDY)])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_pending_tokens_stay_on_the_device(loaded: LoadedModel, params: SamplingParams) -> None:
    """A step is launched before the picks of the step before are read. Its items have another order, and there are new
    ones."""
    plain, device = make_pair(loaded)
    texts = prompts(3)
    first = [item(i, text, 0, params) for i, text in enumerate(texts)]
    launches = [device.launch(ScheduledBatch(first))]
    expected = [output.token_ids[0] for output in plain.launch(ScheduledBatch(first)).result().items]
    later = [
        item(2, [PENDING], len(texts[2]), params, pending_from=2),
        item(5, [9, 8, 7], 0, params),
        item(0, [PENDING], len(texts[0]), params, pending_from=0),
    ]
    launches.append(device.launch(ScheduledBatch(later)))
    assert [output.token_ids[0] for output in launches[0].result().items] == expected
    known = [
        item(2, [expected[2]], len(texts[2]), params),
        item(5, [9, 8, 7], 0, params),
        item(0, [expected[0]], len(texts[0]), params),
    ]
    assert launches[1].result().items == plain.launch(ScheduledBatch(known)).result().items


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_several_steps_in_one_go(loaded: LoadedModel, params: SamplingParams) -> None:
    """Runs four steps without the host, then four more whose first token is pending."""
    plain, device = make_pair(loaded)
    texts = prompts(3)
    picks = both((plain, device), [item(i, text, 0, params) for i, text in enumerate(texts)])
    for text, pick in zip(texts, picks, strict=True):
        text.extend(pick)
    items = [item(i, text[-1:], len(text) - 1, params) for i, text in enumerate(texts)]
    ahead = [item(i, [PENDING], len(text) + 3, params, pending_from=i) for i, text in enumerate(texts)]
    launches = [device.launch(ScheduledBatch(items, 4)), device.launch(ScheduledBatch(ahead, 4))]
    for index, text in enumerate(texts):
        for _ in range(8):
            step = [item(index, text[-1:], len(text) - 1, params)]
            text.extend(plain.launch(ScheduledBatch(step)).result().items[0].token_ids)
    results = [launch.result().items for launch in launches]
    for index, text in enumerate(texts):
        assert [*results[0][index].token_ids, *results[1][index].token_ids] == text[-8:]


def test_logprobs_bias_and_penalties(loaded: LoadedModel) -> None:
    pair = make_pair(loaded)
    texts = prompts(4)
    biased = SamplingParams(temperature=0.0, logit_bias={7: 50.0})
    seen = SeenTokens(np.array(texts[1]), [3, 3])
    penal = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=4)
    picks = both(
        pair,
        [
            item(0, texts[0], 0, biased, logprobs=True),
            item(1, texts[1], 0, penal, seen=seen),
            item(2, texts[2], 0, SAMPLED, logprobs=True),
            item(3, texts[3], 0, GREEDY),
        ],
    )
    assert picks[0] == (7,)


class RoundedLogits:
    """A model whose logits are rounded to bfloat16, and given as such or in float32."""

    def __init__(self, model: CausalModel, dtype: torch.dtype) -> None:
        self.forward = model.forward
        self._model, self._dtype = model, dtype

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RE).bfloat16().to(self._dtype)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_in_half_precision_are_edited_in_full(loaded: LoadedModel, temperature: float) -> None:
    """A GPU's logits are in the type of its activations. A large bias must not round their differences away."""
    in_full, in_half = (
        replace(loaded, model=RoundedLogits(loaded.model, dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    pair = make_pair(in_full)[0], make_pair(in_half)[1]
    biased = SamplingParams(
        temperature=temperature, logit_bias=dict.fromkeys(range(VOCAB // 2), 50.0), seed=2
    )
    both(pair, [item(index, text, 0, biased) for index, text in enumerate(prompts(6))])


def test_log_probabilities_are_made_with_the_step(loaded: LoadedModel) -> None:
    """Later launches do not change them. Drafts have rows of their own."""
    pair = plain, device = make_pair(loaded, max_graph_tokens=16)
    texts = prompts(3)
    picks = both(pair, [item(i, text, 0, GREEDY) for i, text in enumerate(texts)])
    for text, pick in zip(texts, picks, strict=True):
        text.extend(pick)
    right = plain.launch(ScheduledBatch([item(1, texts[1][-1:], len(texts[1]) - 1, GREEDY)])).result()
    batch = [
        item(0, texts[0][-1:], len(texts[0]) - 1, GREEDY),
        item(1, [texts[1][-1], right.items[0].token_ids[0], 5], len(texts[1]) - 1, GREEDY, num_drafts=2, logprobs=True),
        item(2, texts[2][-1:], len(texts[2]) - 1, SAMPLED, logprobs=True),
    ]  # fmt: skip
    expected = plain.launch(ScheduledBatch(batch)).result().items
    launch = device.launch(ScheduledBatch(batch))
    device.launch(ScheduledBatch([item(4, [7, 8, 9], 0, SAMPLED, logprobs=True)]))
    for ours, theirs in zip(launch.result().items, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (one.token_id, len(one.top)) == (other.token_id, len(other.top))
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [len(output.logprobs) for output in expected] == [0, len(expected[1].token_ids), 1]


def test_scores_of_input_tokens_take_the_careful_way(loaded: LoadedModel) -> None:
    """The next step may have tokens that are pending in such a step."""
    pair = make_pair(loaded)
    text = prompts(1)[0]
    first = [item(0, text, 0, GREEDY, input_logprobs_from=0), item(1, text, 0, GREEDY)]
    (pick, _) = both(pair, first)
    later = item(1, [PENDING], len(text), GREEDY, pending_from=1)
    ours = pair[1].launch(ScheduledBatch([later])).result().items
    known = item(1, list(pick), len(text), GREEDY)
    assert ours == pair[0].launch(ScheduledBatch([known])).result().items


def test_pending_tokens_reach_the_careful_way(loaded: LoadedModel) -> None:
    plain, device = make_pair(loaded)
    text = prompts(1)[0]
    first = ScheduledBatch([item(0, text, 0, GREEDY)])
    pick = plain.launch(first).result().items[0].token_ids
    device.launch(first).result()
    scored = item(1, text, 0, GREEDY, input_logprobs_from=2)
    pending = item(0, [PENDING], len(text), GREEDY, pending_from=0)
    ours = device.launch(ScheduledBatch([pending, scored])).result().items
    known = item(0, list(pick), len(text), GREEDY)
    theirs = plain.launch(ScheduledBatch([known, scored])).result().items
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    assert len(ours[1].input_logprobs) == len(text) - 2


def captures_all(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(TorchTables, "captures", lambda *_: True)
    return Recorded()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_was_captured_serves_every_step_of_its_size(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    recorded = captures_all(monkeypatch)
    plain, device = make_pair(loaded, max_graph_tokens=24, recorded=recorded)
    texts = prompts(3, length=5)
    for _ in range(2):  # the second round uses buffers with the first round's contents
        first = [item(i, text, 0, params) for i, text in enumerate(texts)]
        picks = both((plain, device), first)
        items = [item(i, list(pick), len(texts[i]), params) for i, pick in enumerate(picks)]
        launch = device.launch(ScheduledBatch(items, 4))
        expected = plain.launch(ScheduledBatch(items, 4)).result().items
        assert [output.token_ids for output in launch.result().items] == [o.token_ids for o in expected]
        texts = [text[2:] for text in texts[:2]]
    assert all(captured for _, captured in recorded.runs)
    names = {key[0] for key, _ in recorded.runs}  # type: ignore[index]
    assert names == {"unpack", "body", "advance", "head"}


def test_the_head_is_captured_for_all_that_run_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows, which is the most, are padded to eight."""
    recorded = captures_all(monkeypatch)
    execution = ExecutionSettings(max_graph_tokens=8)
    pool = make_kv_pool(loaded.layout, CacheSettings(PAGE_SIZE, 60), loaded.dtype, loaded.device)
    choice = choose_attention("torch", pool, loaded.device)
    careful = careful_runner(loaded, pool, choice, None, execution)
    limits = StepLimits(rows=64, items=5, sampled=5, steps=1)
    runner = device_runner(loaded, careful, pool, choice, limits, recorded, execution, OneRank())
    runner.capture()
    runner.launch(ScheduledBatch([item(i, [7], 0, GREEDY) for i in range(5)])).result()
    assert all(captured for _, captured in recorded.runs)


def test_captures_write_nothing_to_the_pools(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends may read slots that no token was written to and multiply them by zero."""
    recorded = captures_all(monkeypatch)
    execution = ExecutionSettings(max_graph_tokens=8, decode_steps=4)
    pool = make_kv_pool(loaded.layout, CacheSettings(PAGE_SIZE, 60), loaded.dtype, loaded.device)
    pool.full.kv_LJKSD.fill_(7.0)
    choice = choose_attention("torch", pool, loaded.device)
    careful = careful_runner(loaded, pool, choice, None, execution)
    limits = StepLimits(rows=64, items=5, sampled=5, steps=4)
    runner = device_runner(loaded, careful, pool, choice, limits, recorded, execution, OneRank())
    runner.rehearse(64, 5)
    runner.capture()
    assert (pool.full.kv_LJKSD == 7.0).all()


def test_more_may_be_sampled_than_a_rehearsed_step_has_rows(loaded: LoadedModel) -> None:
    """Operators warn if a result's size differs from that of the memory they are given."""
    _, runner = make_pair(loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.rehearse(10, 1)


def test_attention_that_cannot_be_captured_leaves_the_head_to_graphs(loaded: LoadedModel) -> None:
    recorded = Recorded()
    pair = make_pair(loaded, recorded=recorded)
    both(pair, [item(0, prompts(1)[0][:5], 0, GREEDY)])
    if loaded.device.type == "cpu":
        assert {key[0] for key in recorded.captured} == {"head"}  # type: ignore[index]


class Hung:
    """A Fence that the device never reaches."""

    def __init__(self, device: torch.device) -> None: ...

    def wait(self, timeout_s: float) -> None:
        raise TimeoutError(f"{timeout_s} s are over")


def test_a_device_that_does_not_answer_is_lost(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still run what it was given, so buffers and pages cannot be used again."""
    _, device = make_pair(loaded)
    monkeypatch.setattr(device_runner_module, "Fence", Hung)
    launch = device.launch(ScheduledBatch([item(0, [1, 2], 0, GREEDY)]))
    with pytest.raises(RunnerLost, match="s are over"):
        launch.result()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_launch_that_fails_leaves_nothing_under_way(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    pair = make_pair(loaded, graphs=False)  # a card's graphs would not call the function that is broken below
    with monkeypatch.context() as broken:
        broken.setattr(loaded.model, "logits", lambda _: 1 // 0)
        if hangs:
            broken.setattr(device_runner_module, "Fence", Hung)
        with pytest.raises(RunnerLost if hangs else ZeroDivisionError, match="zero"):
            pair[1].launch(ScheduledBatch([item(0, [1, 2], 0, GREEDY)]))
    both(pair, [item(0, [1, 2], 0, GREEDY)])


def test_what_is_reported(loaded: LoadedModel) -> None:
    _, device = make_pair(loaded)
    about = device.describe()
    on_card = loaded.device.type == "cuda"
    assert (about["runner"], about["graphs"]) == ("device", "1,2,4,8" if on_card else "off")
    assert about["runs_ahead"]
    assert about["attention"] in (("triton",) if on_card else ("cpu", "torch"))
    assert about["device"] == device_name(loaded.device)
