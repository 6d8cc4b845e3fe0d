"""Mutations fit the product. A mutation that fails by itself would be found, and would prove nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_stands_in_takes_the_same_arguments(name: str) -> None:
    for each in MUTATIONS[name]():
        replaced = inspect.getattr_static(each.getter(), each.attribute)
        if inspect.isfunction(replaced):
            assert inspect.iscoroutinefunction(each.new) == inspect.iscoroutinefunction(replaced)
            bind_as(each.new, replaced)


def bind_as(stand_in: Callable[..., Any], replaced: Callable[..., Any]) -> None:
    """Raises TypeError if the stand-in cannot be called with all arguments of the replaced function."""
    parameters = inspect.signature(replaced).parameters.values()
    in_order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    inspect.signature(stand_in).bind(*in_order, **by_name)
