"""Fixtures that several tests of the engine share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engine.engine_rig import Rig


@pytest.fixture(scope="session", autouse=True)
def interpreter_does_nothing_twice() -> Iterator[None]:
    """Triton's interpreter puts its own functions in the place of the language's builtins, anew at every call of a
    function within a kernel. Here it does so once. It also makes a table of dtypes for each value, and computes each
    sum and product of integers again to look for an overflow, of which it says nothing unless it debugs. Together that
    is half of its time."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    tl, builder = interpreter.tl, interpreter.interpreter_builder
    assert not builder.options.debug
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype: Any) -> Any:
        return of_scalar(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    once = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
    once.restore()


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["plain", "ahead", "ahead by four"])
def ways_to_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test three times: with one step at a time, with one step planned ahead, and with four steps in one
    launch."""
    runs_ahead, decode_steps = request.param
    monkeypatch.setattr(Rig, "runs_ahead", runs_ahead)
    monkeypatch.setattr(Rig, "decode_steps", decode_steps)
