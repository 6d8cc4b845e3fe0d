"""What a stream sends after its start passes no layer of the application that does not need to see it."""

from __future__ import annotations

import sys

import pytest
from fastapi import FastAPI

from serving.front.api.sse import TurnEventStream
from tests.unit.serving.front.streamed_requests import STREAMED, streamed

WRITES = TurnEventStream._write.__code__


def layers_between() -> list[str]:
    """The modules of the functions between the stream's `_write` and `streamed`, which notes a message, the innermost
    first."""
    frame, modules = sys._getframe(3), []
    while frame is not None and frame.f_code is not WRITES:
        modules.append(frame.f_globals["__name__"])
        frame = frame.f_back
    return modules


@pytest.mark.parametrize("path", STREAMED)
async def test_what_follows_the_start_passes_one_layer_of_starlette(app: FastAPI, path: str) -> None:
    layers: dict[str, list[list[str]]] = {"http.response.start": [], "http.response.body": []}
    await streamed(app, path, lambda message: layers[message["type"]].append(layers_between()))
    (start,) = layers["http.response.start"]
    assert "serving.front.api.errors" in start
    assert all(each == ["starlette.middleware.errors"] for each in layers["http.response.body"])
