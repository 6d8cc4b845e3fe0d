"""Why `kedge serve` starts nothing."""

from __future__ import annotations


class StartError(RuntimeError):
    """Nothing was started; the message says why, and what to do."""
