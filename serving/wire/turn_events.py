"""Events of a turn joined to fewer, cut to smaller ones, and ended. What they tell stays the same."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from serving.wire.turns import TurnEvent, TurnFinish


def merge_events(events: list[TurnEvent], last: TurnEvent) -> TurnEvent:
    """One event that tells what all of them told; totals and the finish are those of `last`."""
    every = [*events, last]
    return replace(
        last,
        text="".join(event.text for event in every),
        token_ids=tuple(token for event in every for token in event.token_ids),
        logprobs=tuple(entry for event in every for entry in event.logprobs),
        input_logprobs=tuple(entry for event in every for entry in event.input_logprobs),
    )


class UnreadEvents:
    """Events that are to be read as one. They are joined when they are taken, at a cost that is theirs, and not as each
    arrives. `weight` is that of all of them."""

    def __init__(self, event: TurnEvent | None = None) -> None:
        self._events: list[TurnEvent] = []
        self.weight = 0
        if event is not None:
            self.add(event)

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, event: TurnEvent) -> None:
        self._events.append(event)
        self.weight += event_weight(event)

    def take(self) -> TurnEvent:
        """All of them as one; none is left. There must be one."""
        *earlier, last = self._events
        self._events, self.weight = [], 0
        return merge_events(earlier, last) if earlier else last


def end_behind(last: TurnEvent, finish: TurnFinish) -> TurnEvent:
    """An event that tells the end alone; totals are those of `last`."""
    return replace(last, text="", token_ids=(), logprobs=(), input_logprobs=(), finish=finish)


def event_weight(event: TurnEvent) -> int:
    """Log-probabilities in it, which is what makes an event large: each may have twenty others beside it."""
    return len(event.logprobs) + len(event.input_logprobs)


def split_event(event: TurnEvent, most: int) -> Iterator[TurnEvent]:
    """Events of at most `most` log-probabilities; text, tokens and the end come with the last. Most events are one."""
    if event_weight(event) <= most:
        yield event
        return
    inputs, outputs = event.input_logprobs, event.logprobs
    ahead = replace(event, text="", token_ids=(), finish=None, error=None)
    while len(inputs) + len(outputs) > most:
        some = inputs[:most]
        others = outputs[: most - len(some)]
        yield replace(ahead, input_logprobs=some, logprobs=others)
        inputs, outputs = inputs[len(some) :], outputs[len(others) :]
    yield replace(event, input_logprobs=inputs, logprobs=outputs)
