"""Session talkers that stream every turn and note what a user feels of it: when its tokens came, and what of the wait
for its first one was the prefill that the turn needs anyway."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import numpy as np
from session_talkers import TOKENS, Answer, Findings, Talker

PREFILL_LENGTHS = (16, 128, 512, 1024, 1750)
PREFILL_TRIES = 3


@dataclass(slots=True)
class StreamedTurn:
    """Times are monotonic seconds. `asked_s` is when it was first sent, so that attempts which fail count.

    Of its `prompt_tokens`, `cached_tokens` had KV when its first token came. `history_len` tokens are the session's
    before it. `replayed`: an earlier attempt had been committed.
    """

    asked_s: float
    history_len: int
    first_s: float = 0.0
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed: bool = False

    @property
    def first_token_s(self) -> float:
        """Seconds until its first token."""
        return self.first_s - self.asked_s

    @property
    def computed_again(self) -> int:
        """Tokens of the history whose KV was computed again. The last one's always is: its logits are needed."""
        return 0 if self.replayed else max(0, self.history_len - 1 - self.cached_tokens)


class StreamingTalker(Talker):
    """`turns` are those that ended; `heard_s` is when anything came, of any turn."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, seed: str) -> None:
        super().__init__(client, findings, seed, stream_share=1.0, leaving_share=0.0)
        self.turns: list[StreamedTurn] = []
        self.heard_s: list[float] = []
        self._turn_now = StreamedTurn(0.0, 0)

    async def _turn(self) -> None:
        self._turn_now = StreamedTurn(time.monotonic(), len(self._history))
        await super()._turn()

    def _heard(self, answer: Answer) -> None:
        now_s, turn = time.monotonic(), self._turn_now
        self.heard_s.append(now_s)
        if not turn.first_s:
            turn.first_s = now_s
            turn.prompt_tokens = answer.meta["prompt_tokens"]
            turn.cached_tokens = answer.meta["cached_tokens"]

    def _note(self, new: list[int], answer: Answer, told: list[int]) -> None:
        turn = self._turn_now
        turn.ended_s, turn.replayed = time.monotonic(), answer.replayed
        self.turns.append(turn)
        self.heard_s.append(turn.ended_s)
        super()._note(new, answer, told)


class PrefillTime:
    """What the prefill of a turn takes on an idle server: the least that it can wait for its first token.

    `lengths` are prompts of so many tokens, none of them with KV; `times_s` what they took to their first token.
    """

    def __init__(self, lengths: Sequence[int], times_s: Sequence[float]) -> None:
        self.lengths, self.times_s = tuple(lengths), tuple(times_s)

    @classmethod
    async def measured(cls, client: httpx.AsyncClient) -> PrefillTime:
        """By requests of their own, one after another; the quickest of some tries at each length. Their prompts are
        never the same, so that none of them has KV."""
        rng, times_s = random.Random(), []
        for length in PREFILL_LENGTHS:
            tries_s = []
            for _ in range(PREFILL_TRIES):
                prompt = [rng.randrange(TOKENS.start, TOKENS.stop) for _ in range(length)]
                body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                began_s = time.monotonic()
                (await client.post("/generate", json=body)).raise_for_status()
                tries_s.append(time.monotonic() - began_s)
            times_s.append(min(tries_s))
        return cls(PREFILL_LENGTHS, times_s)

    def of(self, turn: StreamedTurn) -> float:
        """Seconds for the tokens of the prompt that had no KV, behind those that had. The way to the server and back
        is none of it."""
        return max(0.0, self._at(turn.prompt_tokens) - self._at(turn.cached_tokens))

    def _at(self, length: int) -> float:
        return float(np.interp(length, self.lengths, self.times_s))


def longest_gap_s(times_s: Iterable[float], began_s: float, ended_s: float) -> float:
    """The longest span from `began_s` to `ended_s` in which none of the times lies."""
    within = sorted(at_s for at_s in times_s if began_s <= at_s <= ended_s)
    return max(after - before for before, after in pairwise([began_s, *within, ended_s]))
