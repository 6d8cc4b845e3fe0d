"""Merges, splits and ends the events of a turn. Their content stays the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from serving.wire.turns import TurnEvent, TurnFinish


def merge_events(events: Sequence[TurnEvent]) -> TurnEvent:
    """Merges one or more events into one. Totals and the finish are those of the last event."""
    last = events[-1]
    if len(events) == 1:
        return last
    return replace(
        last,
        text="".join([event.text for event in events]),
        token_ids=tuple([token for event in events for token in event.token_ids]),
        logprobs=tuple([entry for event in events for entry in event.logprobs]),
        input_logprobs=tuple([entry for event in events for entry in event.input_logprobs]),
    )


def end_behind(last: TurnEvent, finish: TurnFinish) -> TurnEvent:
    """An event that brings only the end. Its totals are those of `last`."""
    return replace(last, text="", token_ids=(), logprobs=(), input_logprobs=(), finish=finish)


def event_weight(event: TurnEvent) -> int:
    """The number of log-probabilities, which are what makes an event large: each may come with twenty alternatives."""
    return len(event.logprobs) + len(event.input_logprobs)


def split_event(event: TurnEvent, most: int) -> Iterator[TurnEvent]:
    """Splits an event into events of at most `most` log-probabilities. Text, tokens and the end come with the last
    one."""
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
