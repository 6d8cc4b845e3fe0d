"""With sliding windows, sessions and prompts still share what they have in common."""

from __future__ import annotations

import pytest

from tests.unit.engine.driver import Driver, Talk, request

PAGE_SIZE = 4


def windowed_driver(window_len: int) -> Driver:
    return Driver(page_size=PAGE_SIZE, num_pages=64, window_len=window_len, num_window_pages=48)


@pytest.mark.parametrize("window_len", [4, 6, 8, 13])
@pytest.mark.parametrize("length", range(29, 34))
def test_a_finished_request_leaves_a_prefix_that_can_be_continued(window_len: int, length: int) -> None:
    driver = windowed_driver(window_len)
    prompt = list(range(1, 8))
    (first,) = driver.generate(request("first", prompt, length - 7))
    tokens = prompt + first.token_ids
    (second,) = driver.generate(request("second", [*tokens, 7, 8], 2))
    committed = len(tokens) - 1
    assert second.cached == committed - committed % PAGE_SIZE
    assert second.token_ids == driver.oracle([*tokens, 7, 8], 2)


@pytest.mark.parametrize("window_len", [4, 6, 8, 13])
@pytest.mark.parametrize("length", range(29, 34))
def test_a_fork_at_the_end_of_its_parent_covers_all_of_its_kv(window_len: int, length: int) -> None:
    driver = windowed_driver(window_len)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 8), length - 7)
    covered = driver.fork("parent", "child", parent.history)
    assert covered == len(parent.history) - 1
    child = Talk(driver, "child")
    child.history = list(parent.history)
    assert child.turn([5, 6], 3).cached == covered
    parent.turn([9], 3)


def test_a_long_prompt_that_slides_does_not_keep_others_out() -> None:
    driver = Driver(num_pages=256, context_len=2000, window_len=8, num_window_pages=40)
    driver.add(request("long", [5] * 600, 4))
    driver.step()
    driver.add(request("short", [7, 8, 9], 4))
    driver.step()
    assert driver.outcomes["short"].token_ids, "the long one never holds more of the window pool than it sees"
    driver.run()
    assert driver.outcomes["short"].token_ids == driver.oracle([7, 8, 9], 4)
    assert driver.counters.retractions == 0
