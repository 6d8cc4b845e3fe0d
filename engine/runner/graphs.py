"""CUDA graphs of steps, by size: a launch replays what was captured instead of issuing kernel by kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows that graphs are captured for; a step is padded to the next."""

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries set themselves up."""


class Graphs(Protocol):
    """Runs functions of fixed memory: what they read and write must stay at the addresses of the capture."""

    @property
    def replays(self) -> bool: ...

    def capture(self, key: Hashable, function: Callable[[], None]) -> None: ...

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Replays what was captured under `key`, or calls `function`, which does the same."""

    def close(self) -> None:
        """Drops what was captured. Nothing may be running."""


class NoGraphs:
    """Calls the functions directly: for a CPU, or to measure what graphs gain."""

    replays = False

    def capture(self, key: Hashable, function: Callable[[], None]) -> None: ...

    def run(self, key: Hashable, function: Callable[[], None]) -> None:  # noqa: ARG002
        function()

    def close(self) -> None: ...


class CudaGraphs:
    """Owns the captured graphs, which share one pool of memory: only one runs at a time, and none leaves results in it.
    All are warmed up and captured on one stream, because cuBLAS keeps a workspace for each stream that it is used on.
    """

    replays = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a collection would free memory in the middle of a capture
        try:
            # Other threads may use the device meanwhile; their work is not part of the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            gc.enable()
        self._graphs[key] = graph

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            function()
        else:
            graph.replay()

    def close(self) -> None:
        """Graphs hold the collectives that they contain: those cannot be ended before the graphs are gone."""
        self._graphs.clear()


def make_graphs(device: torch.device, *, wanted: bool) -> Graphs:
    """CudaGraphs on a GPU, if they are wanted."""
    return CudaGraphs(device) if wanted and device.type == "cuda" else NoGraphs()


def ladder(most: int) -> tuple[int, ...]:
    """The sizes up to `most`, which is one of them."""
    return (*(size for size in LADDER if size < most), most)
