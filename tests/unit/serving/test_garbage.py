"""The garbage collector does not scan what was loaded at the start again and again."""

from __future__ import annotations

import gc
import subprocess
import sys

from serving.garbage import unsearched

PROCESS = """
import gc
from serving.garbage import settle

looked_through = []
loaded = [[number] for number in range(10_000)]  # what stays
settle()
gc.callbacks.append(lambda phase, info: looked_through.append(phase))
assert not any(each is loaded[0] for each in gc.get_objects()), "what stays is looked through"
some = [[number] for number in range(20_000)]
assert not looked_through, "a thousand new objects begin a walk"
more = [[number] for number in range(60_000)]
assert looked_through, "garbage cycles are never found"
"""


def test_what_stays_is_looked_through_no_more() -> None:
    """Runs in a process of its own, because it changes the process."""
    subprocess.run([sys.executable, "-c", PROCESS], check=True)


def test_an_import_is_not_looked_through() -> None:
    looked_through = list[str]()

    def note(phase: str, _info: object) -> None:
        looked_through.append(phase)

    gc.callbacks.append(note)
    try:
        with unsearched():
            _kept = [[number] for number in range(200_000)]
            during = len(looked_through)
        assert gc.isenabled()
        _more = [[number] for number in range(200_000)]
    finally:
        gc.callbacks.remove(note)
    assert not during
    assert looked_through


def test_where_nothing_is_searched_it_stays_so() -> None:
    gc.disable()
    try:
        with unsearched():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
