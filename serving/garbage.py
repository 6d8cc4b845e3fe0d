"""Python's search for garbage cycles in a serving process.

A process that has loaded its libraries holds some hundred thousand objects that stay. Python would search many of them
again and again, on whichever thread creates the next object: the engine's thread between two steps, or the event
loop's. So these objects are frozen, as vLLM and SGLang do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""Python searches new objects once this many more were created than freed. Its default is 700. Objects outside cycles
are freed at once in any case."""


@contextmanager
def unsearched() -> Iterator[None]:
    """Python searches nothing within this context. Imports of large libraries create hundreds of thousands of objects
    that stay. Searching these meanwhile takes a sixth of the time of the import."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


def keep() -> None:
    """Freezes the objects there are, and cycles of garbage with them: call it after imports, which leave few of these.
    What frees garbage later need not search what was imported."""
    gc.freeze()


def settle() -> None:
    """Freezes the objects there are and sets the threshold. Call it once, when all long-lived objects exist."""
    gc.collect()
    keep()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
