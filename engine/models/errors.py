"""Errors in finding, reading and understanding a model. They stop the engine from starting."""

from __future__ import annotations


class ModelError(Exception):
    """Base of the errors below."""


class ModelNotFound(ModelError):
    """Neither a directory with a config.json nor a hub id that could be fetched."""


class UnsupportedModel(ModelError):
    """The model, or its configuration, needs something that is not implemented."""


class BadCheckpoint(ModelError):
    """A file cannot be read, or the weights do not fit the configuration: one is missing, left over, or of another
    shape."""
