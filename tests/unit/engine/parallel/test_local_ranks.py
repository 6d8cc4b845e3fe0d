"""Which GPU each rank on this machine sees."""

from __future__ import annotations

import pytest

from engine.parallel.local_ranks import gpu_of_rank


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"]), ("4", ["4", None])],
)
def test_a_rank_sees_the_gpu_of_its_number_among_those_that_its_parent_sees(
    visible: str | None, gpus: list[str | None]
) -> None:
    assert [gpu_of_rank(rank, 2, visible) for rank in range(2)] == gpus


def test_ranks_of_a_parent_that_sees_no_gpu_see_none() -> None:
    """The variable is set, and empty. Rank 1 was given GPU 1 all the same."""
    assert [gpu_of_rank(rank, 2, "") for rank in range(2)] == [None, None]
