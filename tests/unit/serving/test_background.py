"""Work that outlives its caller runs to its end. A failure is logged if nobody else hears of it."""

from __future__ import annotations

import asyncio

import pytest

from serving.background import BackgroundTasks, TasksByKey


async def fail_after(begin: asyncio.Event) -> None:
    await begin.wait()
    raise ValueError("told")


async def test_a_failure_that_its_caller_is_told_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks, begin = BackgroundTasks(), asyncio.Event()
    work = tasks.start(fail_after(begin))
    waiters = [asyncio.create_task(tasks.outcome(work)) for _ in range(2)]
    await asyncio.sleep(0)
    begin.set()
    told = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(error) for error in told] == [ValueError, ValueError]
    with pytest.raises(ValueError, match="told"):
        await tasks.outcome(work)  # later waiters hear of it as well
    assert not caplog.records


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_failure_that_nobody_hears_of_is_logged(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tasks, begin = BackgroundTasks(), asyncio.Event()
    work = tasks.start(fail_after(begin))
    if cancelled:
        waiter = asyncio.create_task(tasks.outcome(work))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
    assert not work.done()
    begin.set()
    await asyncio.wait([work])
    assert [record.message for record in caplog.records] == ["background work failed"]


async def test_what_is_stopped_ends_within_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    tasks, begin = BackgroundTasks(), asyncio.Event()
    work = tasks.start(fail_after(begin))
    await tasks.stop(timeout_s=0.01)
    assert work.cancelled()
    assert not caplog.records


async def test_a_task_is_known_by_its_key_until_it_is_done_or_another_has_the_key() -> None:
    known, ends = TasksByKey[str, bool](), [asyncio.Event() for _ in range(2)]
    first, second = (known.put("key", asyncio.create_task(end.wait())) for end in ends)
    assert known.get("key") is second
    ends[0].set()
    await first
    assert known.get("key") is second
    ends[1].set()
    await second
    assert known.get("key") is None
