"""What a session log in Redis has of a session beside its tokens and results, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from controllers.records import LedgerEntry, ModelFingerprint


@dataclass(frozen=True, slots=True)
class StoredSession:
    """`writer` is the cluster that claimed it last; empty: none did. `last` identifies the last turn, its tokens aside.
    `kept` are the turns whose results are, oldest first: index, idempotency key, digest. Layout 1 has neither `model`
    nor `writer`."""

    entry: LedgerEntry
    tools: str | None = None
    last: list[int | str | None] | None = None
    kept: tuple[tuple[int, str, str | None], ...] = ()
    model: ModelFingerprint | None = None
    writer: str = ""

    @classmethod
    def parse(cls, text: bytes) -> StoredSession:
        fields = json.loads(text)
        kept = tuple((index, key, digest) for index, key, digest in fields.pop("kept"))
        model = fields.pop("model", None)
        return cls(
            LedgerEntry(**fields.pop("entry")),
            kept=kept,
            model=None if model is None else ModelFingerprint(**model),
            **fields,
        )

    def text(self) -> bytes:
        fields = asdict(self)
        if self.entry.closes_after is None:  # versions without it read all other sessions
            del fields["entry"]["closes_after"]
        return json.dumps(fields).encode()
