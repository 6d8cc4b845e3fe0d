"""A session in a session log in Redis, without its tokens and results, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from controllers.records import LedgerEntry, ModelFingerprint


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A stored session. `writer` is the cluster that opened or claimed it last (empty: none). `last` identifies the
    last turn, without its tokens. `kept` are the turns whose results are kept, oldest first: index, idempotency key,
    digest. Layout 1 has neither `model` nor `writer`."""

    entry: LedgerEntry
    tools: str | None = None
    last: list[int | str | None] | None = None
    kept: tuple[tuple[int, str, str | None], ...] = ()
    model: ModelFingerprint | None = None
    writer: str = ""

    @classmethod
    def parse(cls, text: bytes) -> StoredSession:
        values = json.loads(text)
        kept = tuple((index, key, digest) for index, key, digest in values.pop("kept"))
        model = values.pop("model", None)
        return cls(
            LedgerEntry(**values.pop("entry")),
            kept=kept,
            model=None if model is None else ModelFingerprint(**model),
            **values,
        )

    def text(self) -> bytes:
        entry = _values(self.entry)
        if self.entry.closes_after is None:  # so that versions without this field can read the session
            del entry["closes_after"]
        model = None if self.model is None else _values(self.model)
        return json.dumps(_values(self) | {"entry": entry, "model": model}).encode()


def _values(record: Any) -> dict[str, Any]:
    """A dataclass's values by field. `asdict` also copies the values, which took a third of a commit's time."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
