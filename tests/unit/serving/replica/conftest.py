from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.serving.replica_rig import Rig, running_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """One replica, as it is by default."""
    async with running_rig(tmp_path) as running:
        yield running
