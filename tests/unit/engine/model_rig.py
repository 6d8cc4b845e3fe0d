"""The embedded model, in float32, behind the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from engine.assembly import assemble_engine
from engine.build_runner import build_runner
from engine.models.loader import load_model
from engine.settings import (
    CacheSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from tests.unit.engine.engine_rig import WAIT_S, Rig

MODEL = Path(__file__).parents[3] / "assets" / "models" / "kedge-chat"


class ModelRig(Rig):
    """An engine of the model. `end_ids` are its end tokens."""

    def __init__(self, method: SpeculationMethod, end_ids: frozenset[int]) -> None:
        super().__init__()
        loaded = load_model(ModelSettings(str(MODEL), dtype="float32", num_threads=1))
        cache, scheduler = CacheSettings(16, 128, books="strict"), SchedulerSettings(128, 32, 8)
        speculation = SpeculationSettings(method, 4, 1, row_cost=0.0)
        runner = build_runner(loaded, cache, None, scheduler=scheduler, num_drafts=4)
        self.engine = assemble_engine(runner, cache, scheduler, speculation, end_ids, self._sink)
        self.speculates = method != "off"
        self._names = count()

    def new_name(self) -> str:
        """A name for a request that no other has here."""
        return f"r{next(self._names)}"


@contextmanager
def running_model(method: SpeculationMethod, *end_ids: int) -> Iterator[ModelRig]:
    """A started rig. At the end its books are walked, and it is stopped."""
    rig = ModelRig(method, frozenset(end_ids))
    rig.engine.start()
    try:
        yield rig
        rig.check()
    finally:
        rig.engine.stop(WAIT_S)
