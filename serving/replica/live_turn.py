"""One turn in flight on a replica: its call, its output so far, and its events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from controllers.turns import Turn
from engine.api import EngineError, Finish, FinishReason, TokenDelta, TokenLogprob
from serving.replica.prompt_places import PlacedPrompt
from serving.text.output_text import OutputText
from serving.text.text import TextProcessor
from serving.trace.turn_traces import UNTRACED, ReplicaTrace
from serving.watch.metrics import EndedTurn, ReplicaMetrics
from serving.wire.turn_events import end_behind
from serving.wire.turns import (
    ChatPrompt,
    ResumedTurn,
    SaidTurn,
    TextLogprob,
    TextPrompt,
    TurnCall,
    TurnEvent,
    TurnFinish,
)

NOTHING = ResumedTurn(())


@dataclass(frozen=True, slots=True)
class Asker:
    """The client of a turn: `tell` takes the turn's events, and `left` is set once the client has left."""

    tell: Callable[[TurnEvent], None]
    left: asyncio.Future[bool]
    trace: ReplicaTrace

    def has_left(self) -> None:
        if not self.left.done():
            self.left.set_result(True)


@dataclass(slots=True, eq=False)
class LiveTurn:
    """A turn in flight, owned by the coroutine that runs it. `request_id` is the engine's, unique on this replica.

    `turn` is None outside a session. `named` is the turn only if the client names the session. `emit` sends the turn's
    events to the client while it is there. `finish` and `ended` are set once the engine has sent its final delta.
    `resumed` is the part of the answer that a lost replica had sent. The engine's first delta repeats its tokens, which
    do not count for timing. The first event also has the log-probabilities of `resumed`. Times are those of the
    replica's clock. `queued_s` is how long the turn waited in the engine.
    """

    call: TurnCall
    request_id: str
    turn: Turn | None
    prompt: PlacedPrompt
    emit: Callable[[TurnEvent], None]
    output: OutputText
    started_s: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    output_tokens: list[int] = field(default_factory=list)
    events: list[TurnEvent] = field(default_factory=list)
    in_thought: bool = False
    resumed: ResumedTurn = NOTHING
    submitted_s: float = 0.0
    queued_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish: Finish | None = None
    trace: ReplicaTrace = UNTRACED

    @property
    def named(self) -> Turn | None:
        """The turn, if its client names the session."""
        return None if self.call.session is None else self.turn

    def end(self, finish: Finish) -> None:
        self.finish = finish
        self.ended.set()

    def accepted_event(self) -> TurnEvent:
        """The event that says that the engine has the turn. It has no output yet."""
        named = self.named
        return (
            TurnEvent() if named is None else TurnEvent(turn_index=named.turn_index, open_key=named.open_key)
        )

    def final_event(self, ended_s: float) -> TurnEvent:
        """The event that ends a turn which did not fail, at this Unix time. Its totals are those of the last delta."""
        assert self.finish is not None
        last = self.events[-1] if self.events else TurnEvent(prompt_tokens=len(self.prompt.new_tokens))
        finish = TurnFinish(self.finish.reason.value, self.finish.matched)
        return replace(end_behind(last, finish), ended_s=ended_s)


def said_by(live: LiveTurn, whole_turn: TurnEvent) -> SaidTurn:
    """What the log keeps of a session's turn besides its tokens. `whole_turn` is all of its events merged."""
    assert live.turn is not None
    assert live.call.session is not None
    prompt, placed = live.call.prompt, live.prompt
    return SaidTurn(
        num_kept=placed.num_kept,
        messages=prompt.messages[placed.num_told :] if isinstance(prompt, ChatPrompt) else (),
        text=prompt.text if isinstance(prompt, TextPrompt) else None,
        answer=whole_turn.text,
        finish=whole_turn.finish,
        key=live.turn.idempotency_key,
        note=live.call.session.note,
        num_output=len(live.output_tokens),
        cached_tokens=whole_turn.cached_tokens,
        in_thought=whole_turn.in_thought,
        ended_s=whole_turn.ended_s,
    )


class EventMaker:
    """Turns deltas into events, and records the latency and token metrics."""

    def __init__(self, text: TextProcessor, metrics: ReplicaMetrics, clock: Callable[[], float]) -> None:
        self._text = text
        self._metrics = metrics
        self._clock = clock

    def take(self, live: LiveTurn, delta: TokenDelta) -> None:
        """Emits what the delta brings, if anything. If that fails, it ends the turn with an error and raises."""
        try:
            live.queued_s = delta.queued_s
            self._time(live, len(delta.token_ids) - len(live.resumed.token_ids))
            event = self._event(live, delta)
            live.events.append(event)
            if event.token_ids or event.text or event.input_logprobs:
                live.emit(event)
        except Exception as error:
            live.end(
                Finish(FinishReason.ERROR, error=EngineError(f"its output could not be read ({error!r})"))
            )
            raise
        if delta.finish is not None:
            live.end(delta.finish)
            self._count(live, delta, delta.finish)

    def _count(self, live: LiveTurn, delta: TokenDelta, finish: Finish) -> None:
        first_s, last_s = live.first_token_s, live.last_token_s
        ended = EndedTurn(
            finish.reason.value,
            delta.prompt_tokens,
            delta.cached_tokens,
            delta.completion_tokens,
            turn_s=self._clock() - live.started_s,
            queue_s=live.queued_s,
            decode_s=None if first_s is None or last_s is None else last_s - first_s,
            ttft_s=None if first_s is None else first_s - live.started_s,
            prefill_s=None if first_s is None else _prefill_s(live, first_s),
        )
        self._metrics.computed(ended)
        kind = _conversation_kind(live.call)
        if kind is not None:
            self._metrics.conversation(kind, ended, recognized=live.prompt.kept_len > 0)

    def _event(self, live: LiveTurn, delta: TokenDelta) -> TurnEvent:
        known, live.resumed = live.resumed, NOTHING
        live.output_tokens.extend(delta.token_ids)
        finish, named = delta.finish, live.named
        failed = finish is not None and finish.reason is FinishReason.ERROR
        return TurnEvent(
            "" if failed else live.output.push(delta.token_ids, finish),
            delta.token_ids,
            delta.prompt_tokens,
            delta.cached_tokens,
            delta.completion_tokens,
            self._with_texts(known.logprobs, delta.logprobs) if delta.logprobs else known.logprobs,
            self._with_texts(known.input_logprobs, delta.input_logprobs)
            if delta.input_logprobs
            else known.input_logprobs,
            draft_tokens=delta.draft_tokens,
            accepted_draft_tokens=delta.accepted_draft_tokens,
            turn_index=None if named is None else named.turn_index,
            open_key=None if named is None else named.open_key,
            tokenizer=self._text.tokenizer_hash,
            in_thought=live.in_thought,
        )

    def _with_texts(
        self, known: tuple[TextLogprob, ...], logprobs: Sequence[TokenLogprob]
    ) -> tuple[TextLogprob, ...]:
        return known + self._text.text_logprobs(logprobs)

    def _time(self, live: LiveTurn, count: int) -> None:
        if count <= 0:
            return
        now_s = self._clock()
        if live.last_token_s is None:
            live.first_token_s = now_s
            self._metrics.first_token(
                now_s - live.started_s,
                queue_s=live.queued_s,
                prefill_s=_prefill_s(live, now_s),
            )
        else:
            self._metrics.next_tokens(count, now_s - live.last_token_s)
        live.last_token_s = now_s


def _prefill_s(live: LiveTurn, first_token_s: float) -> float:
    """Seconds of prefill. Not below 0: the engine's clock and the replica's may differ by microseconds."""
    return max(0.0, first_token_s - live.submitted_s - live.queued_s)


def _conversation_kind(call: TurnCall) -> str | None:
    """If the client sends the whole conversation: "named" or "unnamed", as it names its session or not. Else None."""
    prompt, session = call.prompt, call.session
    if not isinstance(prompt, ChatPrompt) or not prompt.said:
        return None
    return "unnamed" if session is None or session.fallback == "unnamed" else "named"
