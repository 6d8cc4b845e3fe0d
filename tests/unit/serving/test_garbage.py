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


IMPORT = """
import gc
from serving.garbage import keep, settle

gc.disable()  # as while a library is imported
imported = [[number] for number in range(10_000)]
keep()
of_engine = [[number] for number in range(100)]
found = []
gc.callbacks.append(lambda phase, info: found.append(gc.get_objects()) if phase == "start" else None)
settle()
looked_at = {id(each) for each in found[0]}
assert looked_at >= {*map(id, of_engine)}, "what the engine has left behind is never found"
assert not looked_at & {*map(id, imported)}, "what was imported is searched"
"""


def test_what_was_imported_is_not_searched_when_all_is_loaded() -> None:
    """The search of torch's objects took 0.2 s of CPU time in each replica that started."""
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_an_engine_s_imports_are_kept() -> None:
    program = (
        "import gc\n"
        "from serving.replica.engine_factory import build_local_engine\n"
        "from serving.settings.config import parse_args\n"
        "args = parse_args({'model': {'path': 'assets/models/kedge-chat'}})\n"
        "build_local_engine(args.engine_settings(), print)\n"
        "import torch; print(gc.get_freeze_count() > 50_000, any(each is torch.__dict__ for each in gc.get_objects()))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False"]


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
