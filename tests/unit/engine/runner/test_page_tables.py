"""Page tables on the device equal those of the items. For a table that grew, only the new entries are sent."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch
from engine.runner import page_tables as module
from engine.runner.page_tables import PageTables
from engine.runner.step_buffers import StepBuffers, StepShape
from tests.unit.engine.driver import Driver, Talk, request

CPU = torch.device("cpu")
ROWS, MOST_PAGES = 5, 40


class Sent:
    """Counts the numbers that are sent to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        send = module.send

        def counting(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.count += len(numbers)
            return send(numbers, dtype, device)

        monkeypatch.setattr(module, "send", counting)


def item(pages: list[int], run: int = 0, known_pages: int = 0) -> BatchItem:
    return BatchItem("r", [1], 3, np.array(pages, dtype=np.int32), False, None, run, known_pages=known_pages)


def assert_told(tables: PageTables, items: list[BatchItem]) -> None:
    rows = tables.update(items)
    assert len(set(rows)) == len(rows)
    for each, row in zip(items, rows, strict=True):
        padded = np.full(MOST_PAGES, -1, dtype=np.int32)
        padded[: len(each.pages)] = each.pages
        assert tables.pages_PRM[0, row].tolist() == padded.tolist()
        if each.window_pages is not None:
            padded = np.full(MOST_PAGES, -1, dtype=np.int32)
            padded[: len(each.window_pages)] = each.window_pages
            assert tables.pages_PRM[1, row].tolist() == padded.tolist()


def test_a_row_is_the_run_s_until_another_needs_it() -> None:
    tables = PageTables(1, 2, MOST_PAGES, CPU)
    assert_told(tables, [item([1, 2, 3], run=1), item([4], run=2)])
    assert_told(tables, [item([4, 9], run=2, known_pages=1), item([5], run=3)])  # run 1 has lost its row
    assert_told(tables, [item([1, 2, 3, 8], run=1, known_pages=3), item([4, 9], run=2, known_pages=2)])
    assert_told(tables, [item([7, 7]), item([6])])
    assert_told(tables, [item([4, 9], run=2, known_pages=2)])


def test_what_a_step_did_without_the_tables_is_told_again() -> None:
    tables = PageTables(1, 2, MOST_PAGES, CPU)
    tables.update([item([1, 2], run=1)])
    tables.forget([item([1, 2, 3], run=1, known_pages=2), item([1], run=4)])
    assert_told(tables, [item([1, 2, 3, 4], run=1, known_pages=3)])


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_random_schedules_leave_the_tables_that_their_items_have(windowed: bool, ahead: bool) -> None:
    """Turns grow, share, slide, are retracted and fail. The scheduler says what each step has to send."""
    rng = random.Random(windowed + 2 * ahead)
    driver = Driver(
        num_pages=60, page_size=2, context_len=76, max_batch_tokens=20, max_running=ROWS, ahead=ahead,
        window_len=6 if windowed else None, num_window_pages=60 if windowed else 0,
    )  # fmt: skip
    tables = PageTables(1 + windowed, ROWS, MOST_PAGES, CPU)
    talks = [Talk(driver, f"s{index}") for index in range(7)]
    shared = [1 + n % 90 for n in range(9)]
    execute = driver.runner.execute
    num_checked = 0

    def checked(batch: ScheduledBatch):  # type: ignore[no-untyped-def]
        nonlocal num_checked
        if rng.random() < 0.1:
            tables.forget(batch.items)
        else:
            assert_told(tables, batch.items)
            num_checked += len(batch.items)
        return execute(batch)

    driver.runner.execute = checked  # type: ignore[method-assign]
    for _ in range(60):
        chosen = rng.sample(talks, rng.randrange(1, 7))
        specs = []
        for talk in chosen:
            if len(talk.history) > 45:
                del talk.history[rng.randrange(20) :]
            new_tokens = (
                shared if not talk.history else [rng.randrange(1, 90) for _ in range(rng.randrange(1, 9))]
            )
            specs.append(talk.spec(new_tokens, rng.randrange(1, 14)))
        for spec in specs:
            driver.add(spec)
        for _ in range(rng.randrange(8)):
            if driver.step() is None:
                break
            if rng.random() < 0.2:
                driver.settle()
                driver.scheduler.retract(rng.choice(specs).request_id)
                driver.check()
        driver.run()
        for talk, spec in zip(chosen, specs, strict=True):
            talk.commit(spec, driver.outcomes[spec.request_id])
    assert num_checked > 500


@pytest.mark.parametrize("num_pages", [64, 4096])
def test_a_decode_sends_no_table_again(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 steps of 8 sequences send two entries each, and their places."""
    driver = Driver(
        num_pages=9 * num_pages, page_size=16, context_len=10**6, chunk_size=10**6, max_batch_tokens=10**6
    )
    for index in range(8):
        driver.add(request(f"r{index}", [1 + (n + index) % 90 for n in range(16 * num_pages - 40)], 60))
    monkeypatch.setattr(Driver, "check", lambda _: None)
    monkeypatch.setattr(
        driver.runner, "execute", lambda batch: ModelOutput([ItemOutput((7,)) for _ in batch.items])
    )
    buffers = StepBuffers(8, 8, 8, num_pages + 10, 1, 1, 16, CPU)
    sent = Sent(monkeypatch)
    driver.step()
    for number in range(33):
        batch = driver.step()
        assert batch is not None
        shape = StepShape(8, 8, decode=True)
        buffers.fill(batch, shape, 8, [])
        tables = buffers.tensors(shape).tables.pages_PBM[0]
        assert tables.shape[0] == 8
        for row, each in enumerate(batch.items):
            width = -(-(each.start + 1) // 16)
            assert tables[row, :width].tolist() == each.pages[:width].tolist()
        if number == 0:
            sent.count = 0
    assert sent.count == 8 * 2 * 2
