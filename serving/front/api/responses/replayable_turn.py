"""Turns whose events are repeated from the beginning: while they run in the background, and after they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from serving.wire.turns import TurnCall, TurnEvent, TurnFinish

NOTHING_YET = TurnEvent()
"""The first event of a repeated turn: listeners' replies start with it, before the turn says anything."""


class ReplayableTurn:
    """What a turn has said so far. Any number of listeners read it from its beginning, as if they ran it themselves
    (RunsTurns). A listener that leaves does not end the turn. `end` is the turn's last event, with its whole text; None
    until it has ended."""

    def __init__(self) -> None:
        self.end: TurnEvent | None = None
        self._texts: list[str] = []
        self._last = TurnEvent()
        self._news = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return bool(self._texts) or self.end is not None

    def add(self, event: TurnEvent) -> None:
        """Adds the turn's next event."""
        self._texts.append(event.text)
        self._last = event
        self._tell()

    def broken_off(self, end: TurnEvent) -> TurnEvent:
        """The turn's last event if it comes to this end now, with everything that it has said."""
        last = self._last
        return TurnEvent(
            text=self.text(),
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            completion_tokens=last.completion_tokens,
            finish=end.finish,
            error=end.error,
            in_thought=last.in_thought,
        )

    def finish(self, end: TurnEvent | None = None) -> None:
        """Ends the turn. `end` is its last event; None: that was added already."""
        self.end = end or replace(self._last, text=self.text(), token_ids=())
        self._tell()

    def text(self, num_seen: int = 0) -> str:
        """The text after the first `num_seen` characters."""
        return "".join(self._texts)[num_seen:]

    @property
    def finished_by(self) -> TurnFinish | None:
        return self._last.finish

    @property
    def in_thought(self) -> bool:
        return self._last.in_thought

    @asynccontextmanager
    async def run(self, _call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        yield self._told()

    async def _told(self) -> AsyncIterator[TurnEvent]:
        yield NOTHING_YET
        num_told = num_seen = 0
        while True:
            news, told = self._news, self._texts[num_told:]
            num_told += len(told)
            text = "".join(told)
            if self.end is not None:
                for event in ending(self.end, self.end.text[num_seen:]):
                    yield event
                return
            if told:
                num_seen += len(text)
                yield TurnEvent(text=text, in_thought=self.in_thought)
            await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def ending(end: TurnEvent, text: str) -> list[TurnEvent]:
    """The last events of a turn with this end. `text` was not sent before; a turn that failed has it in an event before
    the error."""
    if end.error is None:
        return [replace(end, text=text)]
    return [TurnEvent(text=text, in_thought=end.in_thought), end] if text else [end]
