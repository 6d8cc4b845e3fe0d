"""The error with which `kedge serve` refuses to start."""

from __future__ import annotations


class StartError(RuntimeError):
    """Nothing was started; the message says why, and what to do about it."""
