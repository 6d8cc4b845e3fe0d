"""How much of a turn its client has been sent. Another replica can go on from there, and nothing is sent twice."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from serving.wire.turn_events import end_behind
from serving.wire.turns import ResumedTurn, TextLogprob, TurnEvent, TurnFinish


class TurnProgress:
    """What a client has been sent of one turn, over all attempts; each attempt sends the turn from its beginning. Owned
    by the code that passes the turn's events on."""

    def __init__(self) -> None:
        self._text_len = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TextLogprob] = []
        self._input_logprobs: list[TextLogprob] = []
        self._turn_index: int | None = None
        self._open_key: str | None = None
        self._tokenizer: str | None = None
        self._replayed: bool | None = None
        """None until something has been sent."""
        self._again: dict[str, int] = {}
        """How much this attempt will still repeat, by field of TurnEvent."""
        self._last = TurnEvent()

    def unsent(self, event: TurnEvent) -> TurnEvent | None:
        """The part of the attempt's next event that the client has not been sent; None if there is no such part."""
        if self._again:
            event = self._cut(event)
            if event.says_nothing:
                return None
        if self._replayed is None:
            self._replayed = event.replayed
        elif event.replayed and not self._replayed:
            # A lost replica ran the turn for this same call, and the log answers: the client has not asked twice.
            event = replace(event, replayed=False)
        self._text_len += len(event.text)
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        self._input_logprobs += event.input_logprobs
        if event.turn_index is not None:
            self._turn_index, self._open_key = event.turn_index, event.open_key
        if event.tokenizer is not None:
            self._tokenizer = event.tokenizer
        self._last = event
        return event

    def aborted(self) -> TurnEvent:
        """The last event of a turn that was aborted while no replica had it, with the totals that were sent last."""
        return end_behind(self._last, TurnFinish("abort"))

    def begin_again(self) -> ResumedTurn:
        """Starts another attempt; returns what its replica is given.

        Log-probabilities may be sent ahead of their tokens; the tokens they name count as sent. If no token was
        sent, the attempt starts from the beginning and computes the log-probabilities of the input again.
        """
        self._again = {
            "text": self._text_len,
            "token_ids": len(self._token_ids),
            "logprobs": len(self._logprobs),
            "input_logprobs": len(self._input_logprobs),
        }
        ahead = self._logprobs[len(self._token_ids) :]
        token_ids = (*self._token_ids, *(entry.token.token_id for entry in ahead))
        return ResumedTurn(
            token_ids=token_ids,
            logprobs=tuple(self._logprobs),
            input_logprobs=tuple(self._input_logprobs) if token_ids else (),
            turn_index=self._turn_index,
            open_key=self._open_key,
            tokenizer=self._tokenizer if token_ids else None,
        )

    def _cut(self, event: TurnEvent) -> TurnEvent:
        rest: dict[str, Any] = {}
        for part, known in self._again.items():
            whole = getattr(event, part)
            rest[part] = whole[known:]
            self._again[part] = max(0, known - len(whole))
        return replace(event, **rest)
