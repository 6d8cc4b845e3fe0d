"""Why a backend of attention cannot serve."""

from __future__ import annotations


class AttentionUnavailable(RuntimeError):
    """The backend `name` cannot run here; `why` is half a sentence that says what is missing."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"attention {name!r} cannot run: {why}")
        self.name = name
        self.why = why
