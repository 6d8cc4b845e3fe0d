"""P1 and P2 under everything at once: speculation, page sizes, chunks, retraction and windows, in every combination.

Each cell runs eight sessions of six turns. Aborts, disconnects, over-long turns, rewinds, stops and requests without a
session are mixed in. The pool holds half of the sessions. Every greedy token is compared with transformers.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import transformers

from engine.models.loader import LoadedModel
from tests.parity.matrix_cell import CONTEXT, Cell, CellRun, Scored
from tests.parity.place import load_here
from tests.parity.test_schedules import assert_greedy, logits_of

pytestmark = pytest.mark.slow

WINDOW = 12

TINY = {
    "vocab_size": 24,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

CELLS = [
    Cell(speculation, page_size, chunked, retracting, seed)
    for seed, (speculation, page_size, chunked, retracting) in enumerate(
        product(("off", "ngram", "draft"), (1, 16, 256), (False, True), (False, True))
    )
]

ONCE_WEDGED = [
    (WINDOW, Cell("off", 1, chunked=True, retracting=False, seed=1010)),
    (None, Cell("draft", 1, chunked=True, retracting=True, seed=1136)),
    (None, Cell("draft", 1, chunked=False, retracting=True, seed=1212)),
]
"""Cells that once got stuck. A turn with priority kept taking back a session that was being saved to make room for
running turns. It also spared sessions whose turns came earlier but were queued behind it. In the end nothing could give
way."""

events_seen: Counter[str] = Counter()


@dataclass
class Models:
    """A checkpoint in transformers and in the engine, and a draft model that often agrees with it."""

    reference: Any
    target: LoadedModel
    draft: LoadedModel


@pytest.fixture(scope="module", params=[None, WINDOW], ids=["full", "windowed"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(request.param, tmp_path_factory)


def make_models(window: int | None, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.manual_seed(11)
    config = transformers.MistralConfig(**TINY, sliding_window=window)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    draft = copy.deepcopy(reference)
    draft.config.sliding_window = None
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    loaded = []
    for name, model in (("target", reference), ("draft", draft)):
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        loaded.append(load_here(directory))
    return Models(reference, *loaded)


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: f"{cell.speculation}-page{cell.page_size}"
    f"{'-chunked' * cell.chunked}{'-retracting' * cell.retracting}",
)  # fmt: skip
def test_every_cell_agrees_with_transformers_and_leaks_nothing(models: Models, cell: Cell) -> None:
    run = CellRun(cell, models.target, models.draft if cell.speculation == "draft" else None)
    run.run()
    assert len(run.finished) >= 30
    assert_greedy(models.reference, run.finished)
    assert_scored(models.reference, run.scored)
    if cell.speculation != "off":
        assert run.events["accepted draft"] > 0
    if cell.retracting:
        assert run.events["retraction"] > 10
    events_seen.update(run.events)


def assert_scored(reference: Any, scored: list[Scored]) -> None:
    """Checks that each prompt's log-probabilities equal the reference's, one for each position."""
    if not scored:
        return
    for each, logits_TV in zip(scored, logits_of(reference, [each.prompt for each in scored]), strict=True):
        logprobs_TV = logits_TV.log_softmax(-1)
        assert [entry.token_id for entry in each.logprobs] == each.prompt[each.start :], each.what
        for position, entry in enumerate(each.logprobs, each.start):
            if position == 0:
                assert entry.logprob is None
                continue
            assert entry.logprob == pytest.approx(
                float(logprobs_TV[position - 1, entry.token_id]), abs=1e-4
            ), f"{each.what}: position {position}"


@pytest.mark.parametrize(("window", "cell"), ONCE_WEDGED)
def test_no_turn_takes_from_those_that_run_what_is_being_freed_for_them(
    window: int | None, cell: Cell, tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = make_models(window, tmp_path_factory)
    CellRun(cell, models.target, models.draft if cell.speculation == "draft" else None).run()


def test_the_cells_cover_what_they_should() -> None:
    """Runs after the cells and checks what happened in them."""
    if len(events_seen) == 0:
        pytest.skip("no cell ran")
    for event in ("abort", "stop", "over-long", "log-probabilities of history", "rewind", "promotion",
                  "demotion to the host"):  # fmt: skip
        assert events_seen[event] >= 10, (event, events_seen)
