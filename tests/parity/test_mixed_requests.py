"""Requests of every kind at once, under everything that tests/parity/test_matrix.py has, with steps planned ahead,
failed steps, forks, and requests that go on where others were. Each token and each end is checked by
tests/parity/expected_picks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.parity.expected_picks import check_ended
from tests.parity.matrix_cell import Cell
from tests.parity.mixed_requests import MixedRun
from tests.parity.test_matrix import WINDOW, Models, assert_scored, make_models
from tests.parity.test_schedules import logits_of

WINDOWS = {"full": None, "windowed": WINDOW}
CELLS = [
    Cell(speculation, page_size, disturbed, disturbed, seed, ahead=ahead)
    for seed, (speculation, page_size, disturbed, ahead) in enumerate(
        product(("off", "ngram", "draft"), (1, 16), (False, True), (False, True)), 900
    )
]
AT_EVERY_CHANGE = CELLS[1::5]


def cells() -> Iterator[Any]:
    """Models and their cells. Of proposer, page size, disturbance, steps ahead and window every four are there in every
    combination."""
    for cell in CELLS:
        odd = (cell.page_size == 1) ^ cell.chunked ^ cell.ahead
        name = f"{cell.speculation}-page{cell.page_size}{'-disturbed' * cell.chunked}{'-ahead' * cell.ahead}"
        window = "windowed" if odd else "full"
        marks = [pytest.mark.slow] * (cell not in AT_EVERY_CHANGE)
        yield pytest.param(window, cell, id=f"{window}-{name}", marks=marks)


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(WINDOWS[request.param], tmp_path_factory)


@pytest.mark.parametrize(("models", "cell"), list(cells()), indirect=["models"])
def test_every_request_says_what_its_parameters_mean(models: Models, cell: Cell) -> None:
    run = MixedRun(cell, models.target, models.draft if cell.speculation == "draft" else None)
    run.run()
    sequences = [[*ended.prompt, *ended.flight.output] for ended in run.ended]
    for ended, logits_TV in zip(run.ended, logits_of(models.reference, sequences), strict=True):
        try:
            check_ended(ended, logits_TV.double().numpy())
        except AssertionError as error:
            raise AssertionError(f"seed {cell.seed}, {ended}: {error}") from error
    assert_scored(models.reference, [each for each in run.scored if each.logprobs])
    assert all(fork.result(0) >= 0 for fork in run.forks)
    assert_covered(run.events)


def assert_covered(events: Counter[str]) -> None:
    for event in ("stop", "length", "abort", "resumed", "StepFailed"):
        assert events[event] > 0, (event, events)
