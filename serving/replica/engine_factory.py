"""How a replica makes its engine.

Ray sends a replica the name of this function, and the replica's process imports the module that has it. So the module
must import nothing of the front end.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.api import DeltaSink, Engine
from engine.settings import EngineSettings
from serving.garbage import keep, unsearched

EngineFactory = Callable[[EngineSettings, DeltaSink], Engine]


def build_local_engine(settings: EngineSettings, sink: DeltaSink) -> Engine:
    """An engine whose ranks all run in this process or are its children. Raises what engine.build.build_engine does."""
    with unsearched():  # only where the engine runs: this imports torch, which takes seconds
        from engine.build import build_engine
    keep()

    return build_engine(settings, sink)
