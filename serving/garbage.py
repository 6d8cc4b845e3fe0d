"""How a process looks for garbage cycles once it serves.

A process that has loaded its libraries holds some hundred thousand objects that stay. Python would look through many of
them again and again, at whatever thread makes the next object: the engine's, between two steps, or the event loop.
vLLM and SGLang freeze them in the same way.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""So many more than were freed are looked through at a time; Python's own number is 700. What is no cycle is freed at
once in any case."""


def settle() -> None:
    """Call it once, when everything is there that lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
