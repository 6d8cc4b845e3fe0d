"""What goes wrong between ranks. None of it can be mended: the replica has to be replaced as a whole."""

from __future__ import annotations

from engine.runner.protocol import RunnerLost


class RanksLost(RunnerLost):
    """A rank failed, died, or did not answer in time."""


class RanksNotStarted(RuntimeError):
    """Not every rank came up with its share of the model."""
