"""What several files of this folder are given. Some have a `served` of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.serving.responses_client import Served, served_responses


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with served_responses(tmp_path) as served:
        yield served
