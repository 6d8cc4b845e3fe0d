"""The GPU's runner with a model whose products of few rows use the kernel, compared with a plain step with torch's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from engine.kernels.few_rows import MOST_ROWS, FewRowsLinear, RowTiles
from engine.models.linear import LinearFactory, PlainLinear
from engine.models.loader import LoadedModel, load_model
from engine.models.measured_linear import TORCH, MeasuredLinears
from engine.settings import ModelSettings
from tests.unit.engine.runner.test_device_runner import CONFIG, GREEDY, both, item, make_pair, prompts

TILES = RowTiles(32, 32, 1, 2)


def load(directory: Path, linears: LinearFactory) -> LoadedModel:
    settings = ModelSettings(str(directory), load_format="dummy", dtype="float32", seed=5)
    return load_model(settings, linears)


def test_steps_of_few_and_of_many_rows_pick_what_torch_picks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implementation changes in the middle of a turn, because prompts have more rows than the kernel takes."""
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows: set[int] = set()
    call = FewRowsLinear.__call__
    monkeypatch.setattr(FewRowsLinear, "__call__", lambda self, x_NI: rows.add(len(x_NI)) or call(self, x_NI))
    ways: dict[str, LinearFactory] = {TORCH: PlainLinear, "few": partial(FewRowsLinear, tiles=TILES)}
    linears = MeasuredLinears(ways, lambda _calls: [2.0, 1.0])
    plain, _ = make_pair(load(tmp_path, PlainLinear), graphs=False)
    _, device = make_pair(load(tmp_path, linears), max_graph_tokens=2)
    texts = prompts(3)
    picks = both((plain, device), [item(i, text, 0, GREEDY) for i, text in enumerate(texts)])
    assert sum(map(len, texts)) > MOST_ROWS
    for count in (3, 1, 1):
        for text, pick in zip(texts, picks, strict=False):
            text.extend(pick)
        rows.clear()
        items = [item(i, text[-1:], len(text) - 1, GREEDY) for i, text in enumerate(texts[:count])]
        picks = both((plain, device), items)
        assert rows == {count}
    assert len(set(texts[0][-3:])) > 1, "a model that says one thing proves little"
