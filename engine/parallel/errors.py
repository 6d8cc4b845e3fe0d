"""What goes wrong between ranks. None of it can be mended: the replica has to be replaced as a whole."""

from __future__ import annotations


class RanksLost(RuntimeError):
    """A rank failed, died, or did not answer in time: no further step can run."""


class RanksNotStarted(RuntimeError):
    """Not every rank came up with its share of the model."""
