"""Fixtures that several tests of the engine share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.unit.engine.engine_rig import Rig


@pytest.fixture(scope="session", autouse=True)
def language_is_looked_through_once() -> Iterator[None]:
    """Triton's interpreter puts its own functions in the place of the language's builtins, anew at every call of a
    function within a kernel. To find them it looks through the whole language, which takes a third of its time. Here it
    does so once."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name))]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        yield


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["plain", "ahead", "ahead by four"])
def ways_to_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test three times: with one step at a time, with one step planned ahead, and with four steps in one
    launch."""
    runs_ahead, decode_steps = request.param
    monkeypatch.setattr(Rig, "runs_ahead", runs_ahead)
    monkeypatch.setattr(Rig, "decode_steps", decode_steps)
